"""A backbone computed by OpenVINO: what it returns is its caller's own, in any number of threads."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import frozen
from msgspec.structs import replace
from torch import Tensor

from tests.models.model_families import ServedModel, write_family
from trio_pool_serve.runner.forward_pass import ForwardPass, Padded
from trio_pool_serve.runner.openvino.agreement import all_batches
from trio_pool_serve.runner.probe import compute_rows, probe_rows
from trio_pool_serve.threads.dedicated_threads import HAS_IDLE_PRIORITY
from trio_pool_serve.types import PlannedBatch, PoolingRequest, RenderedPrompt

pytest.importorskip("openvino")

CPU = torch.device("cpu")
BY_OPENVINO = {"backend": "openvino", "cache_dir": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(write_family(tmp_path_factory.mktemp("model") / "bert", "bert"), settings=BY_OPENVINO)


def forward_of(*lengths: int, embeds: bool = False) -> ForwardPass:
    random = np.random.default_rng(1)
    prompts = [
        RenderedPrompt(
            random.integers(5, 60, size=length).astype(np.int32),
            embeds=random.standard_normal((length, 32)).astype(np.float32) if embeds else None,
        )
        for length in lengths
    ]
    return ForwardPass([PoolingRequest(prompt) for prompt in prompts], CPU, pad_token_id=0)


@frozen
class Noting:
    """A program that notes its name when it computes."""

    program: Callable[..., Tensor]
    name: str
    used: list[str]

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.used.append(self.name)
        return self.program(*inputs)


def test_outputs_of_successive_passes_share_no_memory(served: ServedModel):
    first = served.runner.compute(forward_of(9, 4)).flat
    kept = first.clone()
    served.runner.compute(forward_of(9, 9))
    assert torch.equal(first, kept)


def test_two_threads_at_once_get_what_one_gets_after_the_other(served: ServedModel):
    passes = [forward_of(*range(1, 2 + n % 7), 3 + n) for n in range(40)]
    expected = [served.runner.compute(forward) for forward in passes]
    with ThreadPoolExecutor(4) as threads:
        ours = list(threads.map(served.runner.compute, passes))
    assert all(torch.equal(a.flat, b.flat) for a, b in zip(ours, expected, strict=True))


def test_shares_of_the_cores_give_what_all_cores_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two batches at once are computed by another program than a large one alone."""
    from trio_pool_serve.runner.openvino import openvino_backbone
    from trio_pool_serve.runner.openvino.conversion import convert
    from trio_pool_serve.runner.openvino.openvino_backbone import CompileParams, compile_model

    backbone = ServedModel(write_family(tmp_path / "bert", "bert")).runner.backbone
    compiled = compile_model(backbone, convert(backbone), CompileParams("f32", cores=2, streams=2, sharers=2))
    programs: list[str] = []
    for name in ("for_shares", "for_all_cores"):
        monkeypatch.setattr(compiled, name, Noting(getattr(compiled, name), name, programs))
    short, long = forward_of(20, 3), forward_of(*[60] * 64)
    multiplications = long.input_ids.numel() * (backbone.parameters - backbone.embedding_parameters)
    monkeypatch.setattr(openvino_backbone, "MIN_MULTIPLICATIONS", multiplications)
    outputs = []
    for threads, forward in ((1, short), (2, short), (1, long), (2, long)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outputs.append(compiled(forward))
    assert programs == ["for_shares"] * 3 + ["for_all_cores"], "a second thread for little work waits for the first"
    assert torch.allclose(outputs[2], outputs[3], atol=1e-5)


@pytest.mark.skipif(not HAS_IDLE_PRIORITY, reason="this system has no idle priority")
def test_planned_batches_are_computed_by_threads_of_idle_priority_to_the_same_bits(tmp_path: Path):
    from trio_pool_serve.runner.openvino.conversion import convert
    from trio_pool_serve.runner.openvino.openvino_backbone import CompileParams, compile_model

    backbone = ServedModel(write_family(tmp_path / "bert", "bert")).runner.backbone
    compiled = compile_model(backbone, convert(backbone), CompileParams("f32", cores=2, streams=2, idle_streams=2))
    ordinary = forward_of(20, 3)
    rows = [replace(request, planned=PlannedBatch(1, 2)) for request in ordinary.requests]
    planned = ForwardPass(rows, CPU, pad_token_id=0)
    expected = compiled(ordinary)
    assert idle_threads() == set()
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda _: compiled(planned), range(8)))
    assert all(torch.equal(output, expected) for output in outputs)
    idle = idle_threads()
    assert len(idle) >= 2
    assert threading.get_native_id() not in idle
    compiled(ordinary)
    assert idle_threads() == idle


def idle_threads() -> set[int]:
    """Return the threads of this process that have idle priority."""
    threads = (int(path.name) for path in Path("/proc/self/task").iterdir())
    return {thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_IDLE}


def test_rows_of_token_embeddings_are_computed_by_torch(served: ServedModel):
    forward = forward_of(6, 2, embeds=True)
    with torch.inference_mode():
        assert torch.equal(served.runner.compute(forward).flat, Padded(served.runner.backbone)(forward).flat)


def test_any_number_of_rows_and_tokens_is_computed(served: ServedModel):
    for lengths in ((1,), (48,), (1, 1, 1), (48, 2), tuple(range(1, 33))):
        rows = probe_rows(served.runner.backbone.vocab_size, lengths)
        ours, expected = (
            compute_rows(compute, rows, pad_token_id=0, device=CPU)
            for compute in (served.runner.compute, Padded(served.runner.backbone))
        )
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_that_fails_leaves_nothing_behind(served: ServedModel, threads: int, monkeypatch: pytest.MonkeyPatch):
    """Afterwards OpenVINO failed to compute batches of the same shape as the last one before."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    good, too_long = forward_of(8), forward_of(4000)
    expected = served.runner.compute(good).flat.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            served.runner.compute(too_long)
        for _ in range(4):
            assert torch.allclose(served.runner.compute(good).flat, expected, atol=1e-5)


def test_the_rows_to_compare_have_padding_segments_and_the_longest_length(served: ServedModel):
    backbone = served.runner.backbone
    batches = all_batches(backbone, 48)
    lengths = [[len(prompt.token_ids) for prompt in batch] for batch in batches]
    assert max(max(batch) for batch in lengths) == 48
    assert any(len(set(batch)) > 1 for batch in lengths)
    assert any(prompt.type_ids is not None and prompt.type_ids.any() for batch in batches for prompt in batch)


def test_one_row_to_compare_is_beyond_the_window_of_sliding_attention(tmp_path: Path):
    backbone = ServedModel(write_family(tmp_path / "gemma3", "gemma3")).runner.backbone
    longest = max(len(prompt.token_ids) for batch in all_batches(backbone, 10_000) for prompt in batch)
    assert longest > 8 + 32


class Freed:
    """Notes its name when it is freed, and holds what it was made of."""

    def __init__(self, name: str, freed: list[str], *parts: object) -> None:
        self.parts = parts
        weakref.finalize(self, freed.append, name)


class FreedModel(Freed):
    def create_infer_request(self) -> Freed:
        return Freed("request", self.parts[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_the_last_reference_to_a_compiled_model_is_that_of_a_request(requests):
    """Its destructor lets go of the interpreter lock, that of the model does not."""
    from trio_pool_serve.runner.openvino.openvino_backbone import CompiledModel

    freed: list[str] = []
    compiled = CompiledModel(FreedModel("model", freed, freed))
    compiled.idle += [compiled.take_request() for _ in range(requests)]
    del compiled
    assert freed == [*["request"] * (requests - 1), "model", "request"]

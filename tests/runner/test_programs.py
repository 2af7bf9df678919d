"""Graphs computed by OpenVINO: what a pass returns is its caller's own, in any number of threads."""

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from attrs import evolve
from msgspec.structs import replace

from tests.models.model_families import ServedModel, write_family
from trio_pool_serve.processes.allocator import resident_bytes, return_freed_memory
from trio_pool_serve.runner.openvino import programs
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.openvino.preparation import all_batches
from trio_pool_serve.runner.openvino.programs import CompiledModel, CompileParams, Program, Programs
from trio_pool_serve.threads.dedicated_threads import HAS_IDLE_PRIORITY
from trio_pool_serve.types import Batch, CopiedBatch, Embed, PoolingRequest, RenderedPrompt, Vectors

pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model") / "bert", "bert")


@pytest.fixture(scope="module")
def runner(folder: Path) -> OpenVinoRunner:
    return ServedModel(folder, settings={"backend": "openvino", "cache_dir": str(folder.with_name("cache"))}).runner


def batch_of(*lengths: int) -> Batch:
    random = np.random.default_rng(1)
    rows = [RenderedPrompt(random.integers(5, 60, size=length).astype(np.int32)) for length in lengths]
    return Batch(tuple(PoolingRequest(row, (Embed(),)) for row in rows))


def vectors(runner: Any, batch: Batch) -> Vectors:
    computed = runner.launch(batch)
    assert isinstance(computed, CopiedBatch)
    return np.array([value for (value,) in computed.rows])


def test_two_threads_at_once_get_what_one_gets_after_the_other(runner: OpenVinoRunner):
    batches = [batch_of(*range(1, 2 + n % 7), 3 + n) for n in range(40)]
    expected = [vectors(runner, batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        ours = list(threads.map(lambda batch: vectors(runner, batch), batches))
    assert all(map(np.array_equal, ours, expected))


def test_memory_is_returned_between_passes_and_not_from_under_them(runner: OpenVinoRunner):
    large, batches = batch_of(*[48] * 2048), [batch_of(*range(1, 2 + n % 7), 3 + n) for n in range(40)]
    expected = [vectors(runner, batch) for batch in (large, *batches)]
    runner.return_memory()
    return_freed_memory()
    least = resident_bytes()
    assert np.array_equal(vectors(runner, large), expected[0])
    kept = resident_bytes() - least
    assert kept > 2**24
    runner.return_memory()
    return_freed_memory()
    assert resident_bytes() - least < kept / 2
    with ThreadPoolExecutor(4) as threads:
        computing = [threads.submit(vectors, runner, batch) for batch in batches]
        while not all(each.done() for each in computing):
            runner.return_memory()
        assert all(map(np.array_equal, [each.result() for each in computing], expected[1:]))


def with_programs(runner: OpenVinoRunner, **params: Any) -> OpenVinoRunner:
    """Return the runner with programs that are compiled for other numbers of passes and cores."""
    of = runner.programs
    return evolve(runner, programs=Programs(of.graph, CompileParams("f32", **params)))


def test_shares_of_the_cores_give_what_all_cores_give(runner: OpenVinoRunner, monkeypatch: pytest.MonkeyPatch):
    """Two batches at once are computed by another program than one alone, however short."""
    runner = with_programs(runner, cores=2, streams=2, sharers=2)
    used, compute = [], Program.__call__

    def note(program: Program, *arguments: Any) -> Any:
        used.append(program)
        return compute(program, *arguments)

    monkeypatch.setattr(Program, "__call__", note)
    short, long = batch_of(20, 3), batch_of(*[48] * 64)
    outputs = []
    for threads, batch in ((1, short), (2, short), (1, long), (2, long)):
        monkeypatch.setattr(programs, "granted_threads", lambda most, threads=threads: threads)
        outputs.append(vectors(runner, batch))
    assert used == [runner.programs.for_shares, runner.programs.for_all_cores] * 2
    assert np.allclose(outputs[0], outputs[1], atol=1e-5)
    assert np.allclose(outputs[2], outputs[3], atol=1e-5)


@pytest.mark.skipif(not HAS_IDLE_PRIORITY, reason="this system has no idle priority")
def test_planned_batches_are_computed_by_threads_of_idle_priority_to_the_same_bits(runner: OpenVinoRunner):
    runner = with_programs(runner, cores=2, streams=2, idle_streams=2)
    ordinary = batch_of(20, 3)
    planned = Batch(tuple(replace(request, planned=1) for request in ordinary.requests))
    expected = vectors(runner, ordinary)
    assert idle_threads() == set()
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda _: vectors(runner, planned), range(8)))
    assert all(np.array_equal(output, expected) for output in outputs)
    idle = idle_threads()
    assert len(idle) >= 2
    assert threading.get_native_id() not in idle
    vectors(runner, ordinary)
    assert idle_threads() == idle


def idle_threads() -> set[int]:
    """Return the threads of this process that have idle priority."""
    threads = (int(path.name) for path in Path("/proc/self/task").iterdir())
    return {thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_IDLE}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_that_fails_leaves_nothing_behind(runner: OpenVinoRunner, threads: int, monkeypatch: pytest.MonkeyPatch):
    """Afterwards OpenVINO failed to compute batches of the same shape as the last one before."""
    runner = with_programs(runner, cores=2, streams=1, sharers=2)
    monkeypatch.setattr(programs, "granted_threads", lambda most: threads)
    good, too_long = batch_of(8), batch_of(4000)
    expected = vectors(runner, good)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            runner.launch(too_long)
        for _ in range(4):
            assert np.allclose(vectors(runner, good), expected, atol=1e-5)


def test_the_rows_to_compare_have_padding_segments_and_the_longest_length(folder: Path, tmp_path: Path):
    batches = all_batches(ServedModel(folder).runner.loaded.backbone, 48)
    lengths = [[len(prompt.token_ids) for prompt in batch] for batch in batches]
    assert max(map(max, lengths)) == 48
    assert any(len(set(batch)) > 1 for batch in lengths)
    assert any(prompt.type_ids is not None and prompt.type_ids.any() for batch in batches for prompt in batch)
    slides = ServedModel(write_family(tmp_path / "gemma3", "gemma3")).runner.loaded.backbone
    longest = max(len(prompt.token_ids) for batch in all_batches(slides, 10_000) for prompt in batch)
    assert longest > 8 + 32, "beyond the window of its sliding attention"


class Freed:
    """As OpenVINO's compiled model and its requests; notes its name when it is freed."""

    def __init__(self, name: str, freed: list[str]) -> None:
        self.freed = freed
        weakref.finalize(self, freed.append, name)

    def create_infer_request(self) -> "Freed":
        return Freed("request", self.freed)


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_the_last_reference_to_a_compiled_model_is_that_of_a_request(requests: int):
    """Its destructor lets go of the interpreter lock, that of the model does not."""
    freed: list[str] = []
    compiled = CompiledModel(Freed("model", freed))
    compiled.idle += [compiled.take_request() for _ in range(requests)]
    del compiled
    assert freed == [*["request"] * (requests - 1), "model", "request"]


def test_a_decoder_in_bfloat16_is_computed_by_one_thread(tmp_path: Path):
    """OpenVINO's kernel for its MLPs, which is chosen on CPUs with AMX, would end the process with signal 8."""
    folder = write_family(tmp_path / "qwen3", "qwen3")
    config = transformers.Qwen3Config.from_pretrained(folder, intermediate_size=64)  # a multiple of 32, as real ones
    transformers.Qwen3Model(config).save_pretrained(folder)
    cache = tmp_path / "cache"
    runner = ServedModel(folder, settings={"backend": "openvino", "cache_dir": str(cache)}).runner
    kernels = Programs(runner.programs.graph, CompileParams("bf16", cores=2)).for_shares.compiled.model
    kinds = {node.get_rt_info()["layerType"].value for node in kernels.get_runtime_model().get_ops()}
    assert "FullyConnected" in kinds
    assert "LLMMLP" not in kinds  # before one thread is tried, which would end this process
    runner = evolve(runner, programs=Programs(runner.programs.graph, CompileParams("bf16", cores=1)))
    assert vectors(runner, batch_of(8, 3)).shape == (2, 32)

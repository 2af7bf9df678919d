"""Compiled blocks give what the model gives, for rows of any lengths, without compiling again or waiting."""

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from msgspec.structs import replace
from torch._dynamo.utils import counters

from tests.models.lora_adapters import vectors_by_peft, write_lora
from tests.models.model_families import TEXTS, ServedModel, largest_difference, write_family
from tests.runner.fused_kernels import RECORD, compiled_kernels, fused
from tests.runner.test_graphs import SHAPES, FakeGraphBackend
from tests.runner.test_varlen import PACKED, packed_backbone
from trio_pool_serve.runner.cuda.fused_blocks import compiler_files_in, fuse, twin_of
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone
from trio_pool_serve.runner.cuda.varlen import CannotPackError
from trio_pool_serve.runner.padded_or_packed import change_over
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt, TokenEmbed

CPU = torch.device("cpu")
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("new_compiler"),
    pytest.mark.filterwarnings("ignore"),
]  # of the compiler's own code


@pytest.mark.parametrize("name", PACKED)
async def test_every_family_agrees_and_nothing_in_it_waits_for_the_device(tmp_path: Path, name: str):
    """What reads a number from the device, or branches by it, breaks the compiler's graph in two."""
    served = ServedModel(write_family(tmp_path / name, name))
    wanted = (Embed(), TokenEmbed())
    texts = random.Random(7).sample([*TEXTS, *TEXTS], 2 * len(TEXTS))
    expected = await served.values(texts, *wanted)
    served.runner = evolve(served.runner, compute=fused(served, tmp_path))
    assert not counters["graph_break"]
    assert compiled_kernels(served.runner.compute) <= json.loads(RECORD.read_text())[name]["compiled"]
    torch.compiler.set_stance("fail_on_recompile")
    together = await served.values(texts, *wanted)
    alone = [(await served.values([text], *wanted))[0] for text in texts]
    for ours in (together, alone):
        for index in range(2):
            theirs = [row[index] for row in expected]
            size = max(1.0, *(float(np.abs(row).max()) for row in theirs))
            assert largest_difference([row[index] for row in ours], theirs) < TOLERANCE * size


async def test_batches_of_another_thread_and_numbers_of_threads_do_not_disturb_it(tmp_path: Path):
    served = ServedModel(write_family(tmp_path / "bert", "bert"))
    runner, expected = served.runner, await served.embed(TEXTS)
    twin, packed = twin_of(runner.loaded.backbone), packed_backbone(served)
    served.runner = evolve(runner, compute=packed)
    batch = Batch(tuple(await served.requests(TEXTS)))
    ended, launched = threading.Event(), threading.Event()

    def launch() -> None:
        while not ended.is_set():
            served.runner.launch(batch)
            launched.set()

    launching = threading.Thread(target=launch)
    launching.start()
    launched.wait()
    try:
        with compiler_files_in(tmp_path / "files"):
            packed.fused = fuse(twin, runner.params)
    finally:
        ended.set()
        launching.join()
    torch.compiler.set_stance("fail_on_recompile")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert largest_difference(await served.embed(TEXTS), expected) < TOLERANCE
    finally:
        torch.set_num_threads(before)


async def test_graphs_are_captured_again_one_by_one_and_adapted_rows_are_computed_without(tmp_path: Path):
    bert = write_family(tmp_path / "bert", "bert")
    adapter = write_lora(tmp_path / "adapter", bert)
    served, backend = ServedModel(bert), FakeGraphBackend()
    expected = await served.embed(TEXTS)
    packed = fused(served, tmp_path / "files")
    compiled, packed.fused = packed.fused, None
    graphs = GraphedBackbone(packed, backend, CPU)
    graphs.capture(SHAPES)
    served.runner = evolve(served.runner, compute=graphs)
    before, shapes = backend.captures, graphs.shapes
    packed.fused = compiled
    torch.compiler.set_stance("fail_on_recompile")
    for shape in shapes:
        graphs.renew(shape, lambda _: True)
        assert largest_difference(await served.embed(TEXTS), expected) < TOLERANCE
    assert backend.captures == before + len(SHAPES)
    assert backend.replays == len(SHAPES)
    assert graphs.shapes == shapes
    rows = [replace(row, adapter=adapter) for row in await served.requests(TEXTS)]
    adapted = [value for (value,) in await served.runner.launch(Batch(tuple(rows)))]
    assert largest_difference(adapted, vectors_by_peft(bert, adapter, TEXTS)) < TOLERANCE
    single = Batch((PoolingRequest(RenderedPrompt(np.array([5], dtype=np.int32))),))
    await served.runner.launch(single)  # whose sizes of one were not compiled
    assert backend.replays == len(SHAPES) + 1


@pytest.mark.parametrize("fails", ["differs", "raises"])
async def test_if_a_graph_cannot_be_renewed_no_batch_gets_its_output_and_all_are_computed_without(
    tmp_path: Path, fails: str
):
    """The steps that the server runs compare each new graph before it replaces the one before."""
    served = ServedModel(write_family(tmp_path / "bert", "bert"))
    expected = await served.embed(TEXTS)
    runner, twin = served.runner, twin_of(served.runner.loaded.backbone)
    backend = FakeGraphBackend()
    graphs = GraphedBackbone(packed_backbone(served), backend, CPU)
    graphs.capture(SHAPES)
    served.runner = evolve(runner, compute=graphs)
    with compiler_files_in(tmp_path / "files"):
        begin, first, *renewals = change_over(twin, graphs.packed, graphs, runner.params)
    assert len(renewals) == len(SHAPES) - 1
    assert graphs.packed.fused is None
    for step in (begin, first):
        step()
        assert graphs.packed.fused is not None
        assert largest_difference(await served.embed(TEXTS), expected) < TOLERANCE
    if fails == "differs":
        backend.changes_by = 1.0
    else:
        backend.errors[backend.captures + 1] = RuntimeError("CUDA error: operation failed")
    with pytest.raises(
        CannotPackError if fails == "differs" else RuntimeError, match=r"CUDA graphs differ|operation failed"
    ):
        renewals[0]()
    assert graphs.shapes == ()
    assert graphs.packed.fused is None
    assert largest_difference(await served.embed(TEXTS), expected) < TOLERANCE


def test_a_graph_for_which_there_is_no_memory_stays(tmp_path: Path):
    served = ServedModel(write_family(tmp_path / "bert", "bert"))
    backend = FakeGraphBackend()
    graphs = GraphedBackbone(packed_backbone(served), backend, CPU)
    graphs.capture(SHAPES)
    shapes = graphs.shapes
    backend.errors |= {backend.captures + number: torch.OutOfMemoryError() for number in (1, 2)}
    graphs.renew(shapes[0], lambda _: False)
    assert graphs.shapes == shapes

"""The real device: it computes what the processor computes, and its copies overlap with its launches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from torch import Tensor

from tests.models.model_families import FAMILIES, TEXTS, ServedModel, largest_difference, write_family
from tests.runner.test_varlen import PACKED
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone
from trio_pool_serve.runner.output_copy import OutputCopier, Split
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, TokenEmbed, Vectors

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

TOLERANCE = 1e-4
"""Two devices add in different orders."""

LONG_COPY_CYCLES = 2_000_000_000
"""About a second: any launch is over sooner."""


@define(eq=False)
class SlowCopier(OutputCopier):
    """The real one, whose copies can be held up on their stream, once it is open."""

    slow: int = field(default=0, init=False)
    """Number of the next copies to hold up."""
    events: list[torch.cuda.Event] = field(factory=list, init=False)

    def start(self, tensors: Sequence[Tensor], split: Split) -> PooledBatch:
        if self.slow:
            self.slow -= 1
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(LONG_COPY_CYCLES)
        handle = super().start(tensors, split)
        self.events.append(handle._event)
        return handle


async def awaited(handles: list[PooledBatch]) -> list[list[Vectors]]:
    """Copied, so that the pinned buffers are free for the next launches: allocating waits for the device."""
    return [[vector.copy() for (vector,) in await handle] for handle in handles]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module")
def on_cuda(minilm: Path) -> ServedModel:
    return ServedModel(minilm, device="cuda")


@pytest.fixture
def slow_copies(on_cuda: ServedModel) -> SlowCopier:
    """Make the copies of ``on_cuda`` slow on request."""
    copier = SlowCopier(on_cuda.runner.params.device, Offload())
    on_cuda.runner = evolve(on_cuda.runner, copier=copier)
    return copier


async def test_every_family_agrees_with_the_processor(path: Path):
    expected = await ServedModel(path).embed(TEXTS)
    assert largest_difference(await ServedModel(path, device="cuda").embed(TEXTS), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        ("bfloat16", 0.999),
        ("float16", 0.999),
        pytest.param(
            "fp8",
            0.98,
            marks=pytest.mark.skipif(
                torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8"
            ),
        ),
    ],
)
async def test_lower_precision_points_where_float32_does(on_cuda: ServedModel, minilm: Path, dtype: Any, least: float):
    rows, exact = await ServedModel(minilm, device="cuda", dtype=dtype).embed(TEXTS), await on_cuda.embed(TEXTS)
    assert min(float(a @ b) for a, b in zip(rows, exact, strict=True)) >= least


async def test_the_next_launch_returns_before_the_copy_before_it_has_ended(
    on_cuda: ServedModel, slow_copies: SlowCopier
):
    batch = Batch(tuple(await on_cuda.requests(TEXTS)))
    expected = (await awaited([on_cuda.runner.launch(batch) for _ in range(3)]))[0]
    slow_copies.events.clear()
    slow_copies.slow = 1
    handles = [on_cuda.runner.launch(batch) for _ in range(2)]
    assert not slow_copies.events[0].query()
    for rows in await awaited(handles):
        assert largest_difference(rows, expected) < TOLERANCE


async def test_rows_survive_batches_that_are_computed_while_they_are_copied(
    on_cuda: ServedModel, slow_copies: SlowCopier
):
    """The allocator would hand their memory to the next batch, were they freed too early."""
    batches = [Batch(tuple(await on_cuda.requests([text] * 4))) for text in TEXTS]
    expected = await awaited([on_cuda.runner.launch(batch) for batch in batches])
    slow_copies.slow = 1
    handles = [on_cuda.runner.launch(batch) for batch in batches]
    for rows, rows_expected in zip(await awaited(handles), expected, strict=True):
        assert largest_difference(rows, rows_expected) < TOLERANCE


# -- faster ways to compute ------------------------------------------------------------------------------


def half(path: Path, **settings: Any) -> ServedModel:
    served = ServedModel(path, device="cuda", dtype="bfloat16", settings=settings)
    served.runner = served.runner.fitted(4096)  # which captures graphs
    return served


def largest_angle(ours: list[Vectors], theirs: list[Vectors]) -> float:
    """One minus the smallest cosine."""
    return 1 - min(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", PACKED)
async def test_rows_without_padding_agree_with_padded_rows_and_graphs_with_what_they_were_captured_from(
    tmp_path: Path, name: str
):
    path = write_family(tmp_path / name, name)
    padded, packed, graphed = half(path, backend="torch"), half(path, graphs=False), half(path)
    assert "padded (as configured)" in str(padded.runner.facts)
    assert padded.runner.facts.pads
    assert "without padding" in str(packed.runner.facts)
    assert not packed.runner.facts.pads
    assert isinstance(graphed.runner.compute, GraphedBackbone), str(graphed.runner.facts)
    assert graphed.runner.compute.shapes, str(graphed.runner.facts)
    expected = await packed.embed(TEXTS)
    assert largest_angle(expected, await padded.embed(TEXTS)) < 0.01
    for served in (packed, graphed):
        assert largest_angle(await served.embed(TEXTS), expected) < 0.01
        assert largest_angle([(await served.embed([text]))[0] for text in TEXTS], expected) < 0.01


@pytest.mark.usefixtures("new_compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
async def test_compiled_blocks_agree_and_take_over_all_graphs(tmp_path: Path):
    served = half(write_family(tmp_path / "bert", "bert"), cache_dir=str(tmp_path / "cache"))
    graphs: Any = served.runner.compute
    expected, shapes = await served.embed(TEXTS), graphs.shapes
    (improvement,) = served.runner.facts.improvements
    for step in improvement():
        step()
    assert graphs.packed.fused is not None
    assert graphs.shapes == shapes
    torch.compiler.set_stance("fail_on_recompile")
    assert largest_angle(await served.embed(TEXTS), expected) < 0.01
    assert largest_angle([(await served.embed([text]))[0] for text in TEXTS], expected) < 0.01


async def test_the_budget_is_found_on_the_device(minilm: Path):
    served = half(minilm)
    assert "batches of 4096 tokens" in str(served.runner.facts)
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 2**27, dtype=torch.uint8, device="cuda")
    assert ServedModel(minilm, device="cuda", dtype="bfloat16").runner.fitted(2**20).facts.max_batch_tokens < 2**20
    del hog
    torch.cuda.empty_cache()


async def test_a_process_that_shares_the_device_takes_no_more_than_its_share(minilm: Path):
    runner = ServedModel(minilm, device="cuda", dtype="bfloat16").runner
    most = torch.cuda.memory_reserved() + 2**28
    try:
        runner = runner.fitted(2**20, lambda free_bytes: min(2**28, free_bytes()))
        assert runner.facts.max_batch_tokens < 2**20
        assert torch.cuda.memory_reserved() <= most
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


async def test_batches_in_flight_do_not_share_a_graph_s_memory(minilm: Path):
    """Token vectors are copied to the host while the next batch is replayed."""
    served = half(minilm)
    copier = SlowCopier(served.runner.params.device, Offload())
    served.runner = evolve(served.runner, copier=copier)
    batches = [Batch(tuple(await served.ask([text] * 4, [(TokenEmbed(),)] * 4))) for text in TEXTS]
    expected = [await awaited([served.runner.launch(batch)]) for batch in batches]
    copier.slow = 1
    handles = [served.runner.launch(batch) for batch in batches]
    for rows, (rows_expected,) in zip(await awaited(handles), expected, strict=True):
        assert largest_difference(rows, rows_expected) == 0


@pytest.mark.parametrize("settings", [{}, {"graphs": False}, {"backend": "torch"}])
async def test_a_launch_does_not_wait_for_the_device(minilm: Path, settings: Any):
    """Else no batch would be launched while another is computed."""
    served = half(minilm, **settings)
    batches = [Batch(tuple(await served.requests(texts))) for texts in (TEXTS, TEXTS * 40, TEXTS[:1])]
    for batch in batches:  # whatever is allocated on first use
        await awaited([served.runner.launch(batch) for _ in range(3)])
    for batch in batches:
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_COPY_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        handle = served.runner.launch(batch)
        assert not busy.query()
        await awaited([handle])

"""Replayed graphs give what batches of any shape give: on a CPU, with a device that computes again instead."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from msgspec.structs import replace
from torch import Tensor

from tests.models.classifier_families import PROMPTS, write_classifier
from tests.models.lora_adapters import vectors_by_peft, write_lora
from tests.models.model_families import TEXTS, ServedModel, largest_difference, write_family
from tests.runner.test_varlen import PACKED, packed_backbone
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone, shapes_to_capture
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape
from trio_pool_serve.types import Batch, Classify, Embed, PoolingRequest, RenderedPrompt, TokenEmbed

CPU = torch.device("cpu")
TOLERANCE = 1e-5
SHAPES = (PackedShape(256, 16, 48), PackedShape(64, 8, 48), PackedShape(16, 2, 16))


@define(eq=False)
class FakeGraphBackend:
    """Computes anew into the same memory, as a graph does, and counts; some of the captures fail."""

    errors: dict[int, Exception] = field(factory=dict)
    captures: int = field(default=0, init=False)
    replays: int = field(default=0, init=False)
    changes_by: float = field(default=0, init=False)
    """What the next graphs are wrong by."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        self.captures += 1
        if self.captures in self.errors:
            raise self.errors[self.captures]
        output, error = compute(), self.changes_by

        def replay() -> None:
            self.replays += 1
            output.copy_(compute() + error)

        return output, replay


def served_by_graphs(path: Path) -> tuple[ServedModel, FakeGraphBackend]:
    served, backend = ServedModel(path), FakeGraphBackend()
    graphs = GraphedBackbone(packed_backbone(served), backend, CPU)
    served.runner = evolve(served.runner, compute=graphs)
    graphs.capture(SHAPES)
    return served, backend


@pytest.fixture(scope="module", params=PACKED)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_family(tmp_path / "bert", "bert")


async def test_every_family_agrees(path: Path):
    wanted = (Embed(), TokenEmbed())
    expected = await ServedModel(path).values(TEXTS, *wanted)
    served, backend = served_by_graphs(path)
    together = await served.values(TEXTS, *wanted)
    alone = [(await served.values([text], *wanted))[0] for text in TEXTS]
    assert backend.replays == 1 + len(TEXTS)
    for rows in (together, alone):
        for index in range(2):
            assert largest_difference([row[index] for row in rows], [row[index] for row in expected]) < TOLERANCE


async def test_batches_leave_the_rows_of_earlier_and_later_ones_alone(bert: Path):
    """Token vectors of a float32 model are its states themselves, which are copied to the host later."""
    served, _ = served_by_graphs(bert)
    ((first,),) = await served.values(TEXTS[2:3], TokenEmbed())
    before = np.array(first)
    await served.embed(TEXTS)
    ((again,),) = await served.values(TEXTS[2:3], TokenEmbed())
    assert np.array_equal(first, before)
    assert np.array_equal(again, before)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
async def test_classifiers_are_replayed_with_their_segments(tmp_path: Path, name: str):
    """DistilBERT's head is part of the model, and reads the first token of each row."""
    path = write_classifier(tmp_path / name, name, num_labels=1)
    expected = await ServedModel(path).compute(PROMPTS[:2], Classify("raw"))
    served, backend = served_by_graphs(path)
    assert largest_difference(await served.compute(PROMPTS[:2], Classify("raw")), expected) < TOLERANCE
    assert backend.replays == 1


async def test_long_batches_and_embeddings_fit_no_graph_and_are_computed_without(bert: Path):
    served, backend = served_by_graphs(bert)
    texts = [*TEXTS, *TEXTS, *TEXTS]
    rows = await served.embed(texts)
    assert largest_difference(rows, await ServedModel(bert).embed(texts)) < TOLERANCE
    prompt = RenderedPrompt(np.zeros(3, dtype=np.int32), embeds=np.ones((3, 32), dtype=np.float32))
    await served.runner.launch(Batch((PoolingRequest(prompt),)))
    assert backend.replays == 0


async def test_batches_with_an_adapter_are_packed_and_not_replayed(bert: Path, tmp_path: Path):
    adapter = write_lora(tmp_path / "adapter", bert)
    served, backend = served_by_graphs(bert)
    rows = await served.requests(TEXTS)
    adapted = await served.runner.launch(Batch(tuple(replace(row, adapter=adapter) for row in rows)))
    assert largest_difference([value for (value,) in adapted], vectors_by_peft(bert, adapter, TEXTS)) < TOLERANCE
    assert backend.replays == 0
    plain = [value for (value,) in await served.runner.launch(Batch(tuple(rows)))]
    assert largest_difference(plain, vectors_by_peft(bert, None, TEXTS)) < TOLERANCE
    assert backend.replays == 1


async def test_a_capture_that_fails_leaves_no_graphs(bert: Path):
    failing = FakeGraphBackend({2: RuntimeError("operation not permitted when stream is capturing")})
    graphs = GraphedBackbone(packed_backbone(ServedModel(bert)), failing, CPU)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(SHAPES)
    assert graphs.shapes == ()


async def test_a_shape_without_memory_is_left_out(bert: Path):
    small = FakeGraphBackend({1: torch.OutOfMemoryError("CUDA out of memory")})
    graphs = GraphedBackbone(packed_backbone(ServedModel(bert)), small, CPU)
    graphs.capture(SHAPES)
    assert graphs.shapes == (SHAPES[2], SHAPES[1])


@pytest.mark.parametrize(
    ("parameters", "max_tokens", "max_batch_tokens", "largest", "longest"),
    [
        (86_000_000, 512, 16384, 16384, 512),
        (86_000_000, 512, 10_000, 10_000, 512),  # a full batch of any budget
        (20_000_000, 200, 16384, 16384, 200),
        (8_000_000_000, 32768, 16384, 512, 512),  # a large model computes for long
    ],
)
def test_shapes_are_few_and_cover_a_batch(
    parameters: int, max_tokens: int, max_batch_tokens: int, largest: int, longest: int
):
    shapes = shapes_to_capture(parameters=parameters, max_tokens=max_tokens, max_batch_tokens=max_batch_tokens)
    assert len(shapes) == len(set(shapes)) < 50
    tokens = sorted({shape.tokens for shape in shapes})
    assert shapes[0].tokens == tokens[-1] == largest
    assert max(shape.longest for shape in shapes) == longest
    assert max(larger / smaller for smaller, larger in pairwise(tokens)) <= 1.5

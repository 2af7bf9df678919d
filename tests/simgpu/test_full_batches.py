"""What batches of a GPU's size ask of it, for a model with BERT-base's twelve layers: counted, without any values."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bert_shapes import write_bert
from tests.models.model_families import ServedModel
from tests.simgpu.activity import watched
from tests.simgpu.device import without_values
from tests.simgpu.serving import WAYS, on_simulated_device
from trio_pool_serve.runner import computation
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

BATCHES = ((1, 32), (64, 32), (32, 512), (327, 50))
"""Rows and tokens of each; the last is what fits of rows of 50 tokens into 16,384."""

WIDTH = 16
"""Dimensions of the narrow model's vectors, float32."""

CAPTURED = (PackedShape(16384, 1024, 512), PackedShape(2048, 256, 128), PackedShape(32, 4, 32))
"""Of the shapes that are captured, those that these batches take: to capture all takes a minute."""


def served(folder: Path, way: str) -> TransformerRunner:
    return ServedModel(write_bert(folder / "bert", "narrow"), dtype="bfloat16", settings=WAYS[way]).runner


def batch_of(rows: int, tokens: int) -> Batch:
    return Batch(tuple(PoolingRequest(RenderedPrompt(np.ones(tokens, dtype=np.int32))) for _ in range(rows)))


@pytest.mark.slow
def test_without_graphs_it_is_a_dozen_kernels_for_each_layer(tmp_path: Path):
    with on_simulated_device():
        runner = served(tmp_path, "packed")
        with without_values(), watched() as activity:
            runner.launch(batch_of(*BATCHES[-1]))
    activity.require_asynchronous()
    assert 12 * 8 < activity.kernels.total() < 12 * 20


@pytest.fixture(scope="module")
def graphed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformerRunner]:
    with on_simulated_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(computation, "shapes_to_capture", lambda **model: CAPTURED)
        runner = served(tmp_path_factory.mktemp("graphed"), "graphed")
        with without_values():
            assert runner.prepare(16384) == 16384
            assert isinstance(runner.compute, GraphedBackbone)
            assert set(runner.compute.shapes) == set(CAPTURED)
            yield runner


@pytest.mark.parametrize(("rows", "tokens"), BATCHES)
def test_a_batch_is_one_graph_and_a_few_kernels(graphed: TransformerRunner, rows: int, tokens: int):
    with watched() as activity:
        graphed.launch(batch_of(rows, tokens))
    activity.require_asynchronous()
    assert activity.kernels["graph"] == 1
    assert activity.kernels.total() <= 7
    assert activity.copies_to_host == 1
    assert activity.to_host_bytes == rows * WIDTH * 4
    # Ids, positions and segments of the shape, the rows' bounds, and which cell of each row is pooled.
    shape = min(shape for shape in CAPTURED if shape.tokens >= rows * tokens)
    assert activity.copies_to_device <= 2
    assert activity.to_device_bytes <= shape.nbytes + 8 * rows

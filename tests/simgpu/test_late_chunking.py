"""A launch with chunks of documents does not wait for the device, and gives what a CPU gives."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.model_families import pooling, write_family
from tests.simgpu.launch_counts import launch
from tests.simgpu.serving import TEXTS, Kind, Way
from trio_pool_serve.prompts import ChunkedPrompt, RenderingParams
from trio_pool_serve.types import Batch, Embed, EmbedChunks, PoolingRequest, TokenEmbed

NEAR = 0.98
"""Cosine of a vector in bfloat16 with the same in float32."""


def write_mean_bert(folder: Path) -> Path:
    return write_family(folder, "bert", modules=[pooling("mean")])


@pytest.mark.parametrize("way", ["padded", "packed", pytest.param("graphed", marks=pytest.mark.slow)])
async def test_chunks_are_pooled_on_the_device_among_other_rows(tmp_path: Path, way: Way):
    kind = Kind("bert that takes means", write_mean_bert, (Embed(), TokenEmbed()))
    path = kind.write(tmp_path / "model")
    on_cpu = kind.serve(path, dtype="float32")
    spans = ((0, 10), (5, 30), (30, len(TEXTS[2])))
    document = await on_cpu.renderer.render(ChunkedPrompt(TEXTS[2], spans), RenderingParams(truncate_to=48))
    texts = await kind.requests(on_cpu)
    batch = Batch(
        (
            *texts[:2],
            PoolingRequest(document, (EmbedChunks(), Embed())),
            texts[2],
            PoolingRequest(document, (EmbedChunks(dimensions=9, normalize=True),)),
        )
    )
    expected = await on_cpu.runner.launch(batch)
    assert [row[0].shape for row in expected] == [(32,), (32,), (3, 32), (32,), (3, 9)]
    launched = await launch(kind, path, way, batch)
    launched.activity.require_asynchronous()
    for ours, theirs in zip(launched.rows, expected, strict=True):
        for value, other in zip(ours, theirs, strict=True):
            assert value.shape == other.shape
            for a, b in zip(np.atleast_2d(value), np.atleast_2d(other), strict=True):
                assert a @ b >= NEAR * np.linalg.norm(a) * np.linalg.norm(b)

"""A launch of any kind of model, computed in any way, does not wait for the device, and gives what a CPU gives."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lanes import sampled
from tests.models.classifier_families import POOLED
from tests.models.model_families import LAYOUTS, pooling, write_family
from tests.simgpu.launch_counts import RECORD, LaunchCounts, launch
from tests.simgpu.serving import KINDS, TEXTS, WAYS, Kind, Way
from trio_pool_serve.prompts import ChunkedPrompt, RenderingParams
from trio_pool_serve.types import Batch, Classify, Embed, EmbedChunks, PoolingRequest, SparseVector, TokenEmbed

NEAR = 0.98
"""Cosine of an output in bfloat16 with the same in float32."""

VOCABULARY = 4096
"""More than any tiny model has."""


def dense(value: object) -> np.ndarray:
    if isinstance(value, SparseVector):
        row = np.zeros(VOCABULARY, np.float32)
        row[value.indices] = value.values
        return row
    return np.asarray(value)


async def launch_and_compare(kind: Kind, path: Path, way: Way, batch: Batch, expected: list[tuple]) -> LaunchCounts:
    """Launch a batch on the device, which must not be waited for; each vector must be near what a CPU gives."""
    launched = await launch(kind, path, way, batch)
    launched.activity.require_asynchronous()
    for ours, theirs in zip(launched.rows, expected, strict=True):
        for value, other in zip(ours, theirs, strict=True):
            assert dense(value).shape == dense(other).shape
            for a, b in zip(np.atleast_2d(dense(value)), np.atleast_2d(dense(other)), strict=True):
                assert a @ b >= NEAR * np.linalg.norm(a) * np.linalg.norm(b)
    return launched.counts


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, tuple[Batch, list[tuple]]]:
    """What was computed of each kind in float32, for all ways: a batch and its rows."""
    return {}


@sampled(
    ("name", "way"),
    [(name, way) for name in KINDS for way in WAYS],
    keep=[
        ("bert", "padded"), ("bert", "packed"), ("cross-encoder deberta-v2", "packed"), ("splade max", "packed"),
        ("colbert", "graphed"), ("clip", "padded"), ("qwen3_vl", "packed"),
    ],
)  # fmt: skip
async def test_a_launch_does_not_wait_and_gives_what_a_cpu_gives(
    on_cpu: dict[str, tuple[Batch, list[tuple]]], tmp_path: Path, name: str, way: Way
):
    kind = KINDS[name]
    path = kind.write(tmp_path / "model")
    if name not in on_cpu:
        served = kind.serve(path, dtype="float32")
        batch = Batch(tuple(await kind.requests(served)))
        on_cpu[name] = batch, await served.runner.launch(batch)
    batch, expected = on_cpu[name]
    counts = await launch_and_compare(kind, path, way, batch, expected)
    recorded = json.loads(RECORD.read_text())[name][way]
    for counted in ("launches", "to_device_bytes", "to_host_bytes"):
        assert getattr(counts, counted) <= recorded[counted], "more than docs/gpu-launches.md has"
    assert (counts.peak_share or 0) <= 1, "the most uneven batch needs more memory than was tried at the start"


MODULES = (
    Kind("weighted layers", LAYOUTS["bert_with_weighted_layers"], (Embed(), TokenEmbed())),
    Kind("scores", POOLED["modernbert_with_pooled_scores"], (Classify("raw"),), scores_pairs=True),
)


@pytest.mark.parametrize(
    "way", ["packed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("padded", "graphed"))]
)
@pytest.mark.parametrize("kind", MODULES, ids=[kind.name for kind in MODULES])
async def test_modules_before_and_after_pooling_do_not_wait(tmp_path: Path, kind: Kind, way: Way):
    path = kind.write(tmp_path / "model")
    served = kind.serve(path, dtype="float32")
    batch = Batch(tuple(await kind.requests(served)))
    await launch_and_compare(kind, path, way, batch, await served.runner.launch(batch))


@pytest.mark.parametrize("way", ["padded", "packed", pytest.param("graphed", marks=pytest.mark.slow)])
async def test_chunks_of_documents_are_pooled_on_the_device_among_other_rows(tmp_path: Path, way: Way):
    kind = Kind(
        "bert that takes means",
        lambda folder: write_family(folder, "bert", modules=[pooling("mean")]),
        (Embed(), TokenEmbed()),
    )
    path = kind.write(tmp_path / "model")
    on_cpu = kind.serve(path, dtype="float32")
    spans = ((0, 10), (5, 30), (30, len(TEXTS[2])))
    document = await on_cpu.renderer.render(ChunkedPrompt(TEXTS[2], spans), RenderingParams(truncate_to=48))
    texts = await kind.requests(on_cpu)
    whole_and_chunks = PoolingRequest(document, (EmbedChunks(), Embed()))
    short_chunks = PoolingRequest(document, (EmbedChunks(dimensions=9, normalize=True),))
    batch = Batch((*texts[:2], whole_and_chunks, texts[2], short_chunks))
    expected = await on_cpu.runner.launch(batch)
    assert [row[0].shape for row in expected] == [(32,), (32,), (3, 32), (32,), (3, 9)]
    await launch_and_compare(kind, path, way, batch, expected)

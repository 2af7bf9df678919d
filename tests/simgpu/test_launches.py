"""A launch of any kind of model, computed in any way, does not wait for the device, and gives what a CPU gives."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lanes import sampled
from tests.simgpu.launch_counts import RECORD, launch
from tests.simgpu.serving import KINDS, WAYS, Way
from trio_pool_serve.types import Batch, SparseVector

NEAR = 0.98
"""Cosine of an output in bfloat16 with the same in float32."""

VOCABULARY = 4096
"""More than any tiny model has."""


def dense(value: object) -> np.ndarray:
    if isinstance(value, SparseVector):
        row = np.zeros(VOCABULARY, np.float32)
        row[value.indices] = value.values
        return row
    return np.asarray(value).ravel()


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
    launched = await launch(kind, path, way, batch)
    launched.activity.require_asynchronous()
    for ours, theirs in zip(launched.rows, expected, strict=True):
        for value, other in zip(ours, theirs, strict=True):
            a, b = dense(value), dense(other)
            assert a.shape == b.shape
            assert a @ b >= NEAR * np.linalg.norm(a) * np.linalg.norm(b)
    recorded = json.loads(RECORD.read_text())[name][way]
    assert launched.counts.launches <= recorded["launches"], "more kernels and copies than docs/gpu-launches.md has"
    assert (launched.counts.peak_share or 0) <= 1, "the most uneven batch needs more memory than was tried at the start"

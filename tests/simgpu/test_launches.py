"""A launch of any kind of model, computed in any way, does not wait for the device, and gives what a CPU gives."""

from pathlib import Path

import numpy as np
import pytest

from tests.simgpu.activity import watched
from tests.simgpu.serving import KINDS, WAYS, Way, on_simulated_device
from trio_pool_serve.types import Batch, SparseVector

NEAR = 0.98
"""Cosine of an output in bfloat16 with the same in float32."""


def dense(value: object, width: int = 4096) -> np.ndarray:
    if isinstance(value, SparseVector):
        row = np.zeros(width, np.float32)
        row[value.indices] = value.values
        return row
    return np.asarray(value).ravel()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
async def test_a_launch_does_not_wait_and_gives_what_a_cpu_gives(tmp_path: Path, name: str, way: Way):
    kind = KINDS[name]
    path = kind.write(tmp_path / "model")
    on_cpu = kind.serve(path, dtype="float32")
    batch = Batch(tuple(await kind.requests(on_cpu)))
    expected = await on_cpu.runner.launch(batch)
    with on_simulated_device():
        runner = kind.serve(path, **WAYS[way]).runner
        with watched() as activity:
            handle = runner.launch(batch)
        activity.require_asynchronous()
        rows = await handle
        del runner
    for ours, theirs in zip(rows, expected, strict=True):
        for value, other in zip(ours, theirs, strict=True):
            a, b = dense(value), dense(other)
            assert a.shape == b.shape
            assert a @ b >= NEAR * np.linalg.norm(a) * np.linalg.norm(b)

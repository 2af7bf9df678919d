"""Sparse vectors leave the device compact, and whole however many weights they have."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.simgpu.activity import watched
from tests.simgpu.serving import on_simulated_device
from trio_pool_serve.runner.heads import sparse
from trio_pool_serve.runner.heads.sparse import compact
from trio_pool_serve.runner.torch_device import to_device

ROWS, VOCABULARY = 5, 3000


def weights(*counts: int) -> np.ndarray:
    """Rows with so many weights above zero."""
    random = np.random.default_rng(4)
    made = np.zeros((len(counts), VOCABULARY), np.float32)
    for row, count in zip(made, counts, strict=True):
        row[random.choice(VOCABULARY, count, replace=False)] = random.random(count) + 0.1
    return made


def copied(expected: np.ndarray) -> tuple[list[sparse.SparseVector], int]:
    """Return the rows as they come from the device, and the bytes that were copied without waiting."""
    with on_simulated_device() as device, torch.inference_mode():
        on_device = to_device(expected, device)
        with watched() as activity:
            rows = compact(on_device)
            host = torch.empty(rows.tensor.shape, dtype=rows.tensor.dtype, pin_memory=True)
            host.copy_(rows.tensor, non_blocking=True)
        activity.require_asynchronous()
        torch.get_device_module(device).synchronize()
        return rows.split(host.numpy()), activity.to_host_bytes  # type: ignore[return-value]


def assert_rows(rows: list[sparse.SparseVector], expected: np.ndarray) -> None:
    for row, wanted in zip(rows, expected, strict=True):
        assert row.indices.tolist() == np.flatnonzero(wanted).tolist()
        assert np.array_equal(row.values, wanted[wanted > 0])
        assert row.indices.dtype == np.int32


@pytest.mark.parametrize("counts", [(3, 0, 200, 1), (512, 512), (0, 0), (1024, 0)])
def test_as_many_weights_as_are_usual_are_copied_at_once(counts: tuple[int, ...]):
    expected = weights(*counts)
    rows, nbytes = copied(expected)
    assert nbytes == 4 * (len(counts) + 2 * 512 * len(counts))
    assert nbytes < expected.nbytes / 2
    assert_rows(rows, expected)


@pytest.mark.parametrize("counts", [(600, 512), (3000, 0, 3000), (0, 2000)])
def test_more_weights_are_copied_by_the_thread_that_waits(counts: tuple[int, ...]):
    expected = weights(*counts)
    assert_rows(copied(expected)[0], expected)


def test_a_vocabulary_smaller_than_what_is_usual_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "USUAL_WEIGHTS", 10 * VOCABULARY)
    expected = weights(5, 3000)
    rows, nbytes = copied(expected)
    assert nbytes == 4 * (2 + 2 * expected.size)
    assert [len(row.indices) for row in rows] == [5, 3000]

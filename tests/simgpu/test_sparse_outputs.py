"""Sparse vectors leave the device compact, and whole however many weights they have."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.simgpu.activity import watched
from tests.simgpu.serving import on_simulated_device
from trio_pool_serve.runner.heads import sparse
from trio_pool_serve.runner.heads.sparse import compact
from trio_pool_serve.runner.torch_device import to_device

VOCABULARY = 3000


def copied_bytes(*counts: int) -> int:
    """Copy rows with these counts of weights above zero, check them, and return the bytes copied without waiting."""
    random = np.random.default_rng(4)
    expected = np.zeros((len(counts), VOCABULARY), np.float32)
    for row, count in zip(expected, counts, strict=True):
        row[random.choice(VOCABULARY, count, replace=False)] = random.random(count) + 0.1
    with on_simulated_device() as device, torch.inference_mode():
        on_device = to_device(expected, device)
        with watched() as activity:
            rows = compact(on_device)
            host = torch.empty(rows.tensor.shape, dtype=rows.tensor.dtype, pin_memory=True)
            host.copy_(rows.tensor, non_blocking=True)
        activity.require_asynchronous()
        torch.get_device_module(device).synchronize()
        found: Any = rows.split(host.numpy())
    for row, wanted in zip(found, expected, strict=True):
        assert row.indices.tolist() == np.flatnonzero(wanted).tolist()
        assert np.array_equal(row.values, wanted[wanted > 0])
        assert row.indices.dtype == np.int32
    return activity.to_host_bytes


@pytest.mark.parametrize("counts", [(3, 0, 200, 1), (512, 512), (0, 0), (1024, 0)])
def test_as_many_weights_as_are_usual_are_copied_at_once(counts: tuple[int, ...]):
    assert copied_bytes(*counts) == 4 * (len(counts) + 2 * 512 * len(counts)) < 4 * len(counts) * VOCABULARY / 2


@pytest.mark.parametrize("counts", [(600, 512), (3000, 0, 3000), (0, 2000)])
def test_more_weights_are_copied_by_the_thread_that_waits(counts: tuple[int, ...]):
    copied_bytes(*counts)


def test_a_vocabulary_smaller_than_what_is_usual_is_copied_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "USUAL_WEIGHTS", 10 * VOCABULARY)
    assert copied_bytes(5, 3000) == 4 * (2 + 2 * 2 * VOCABULARY)

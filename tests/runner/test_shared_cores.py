import os

import numpy as np
import pytest
import torch

from trio_pool_serve.runner import shared_cores
from trio_pool_serve.runner.scripted import ScriptedRunner
from trio_pool_serve.runner.shared_cores import LONELY_S, SharedCores, SharingRunner
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [1000.0]
    monkeypatch.setattr(shared_cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return now


def later(clock) -> None:
    clock[0] += 2 * LONELY_S


def test_a_lone_replica_has_all_cores_and_busy_ones_their_part(tmp_path, clock):
    first, second, third = (SharedCores.open(tmp_path / "cores", index, 3) for index in range(3))
    later(clock)
    assert first.take() == 8
    assert second.take() == 4
    assert third.take() == 2
    second.release()
    third.release()
    later(clock)
    assert second.take() == 4, "the first computes for long"
    first.release()
    second.release()
    assert third.take() == 2, "they have only just been busy"
    later(clock)
    assert third.take() == 8


def test_a_replica_that_was_killed_while_it_computed_counts_until_another_takes_its_place(tmp_path, clock):
    first, second = (SharedCores.open(tmp_path / "cores", index, 2) for index in range(2))
    first.take()
    later(clock)
    assert second.take() == 4
    SharedCores.open(tmp_path / "cores", 0, 2)
    later(clock)
    assert second.take() == 8


def test_the_runner_computes_with_its_share(tmp_path, clock):
    threads = torch.get_num_threads()
    seen = []
    runner = ScriptedRunner(on_launch=lambda _: seen.append(torch.get_num_threads()))
    first, second = (SharedCores.open(tmp_path / "cores", index, 2) for index in range(2))
    sharing = SharingRunner(runner, first)
    batch = Batch((PoolingRequest(RenderedPrompt(np.ones(3, dtype=np.int32))),))
    try:
        later(clock)
        sharing.launch(batch)
        second.take()
        sharing.launch(batch)
    finally:
        torch.set_num_threads(threads)
    assert seen == [8, 4]
    for name in ("dimensions", "embeds_width", "default_batch_tokens", "held_bytes", "pads"):
        assert getattr(sharing, name) == getattr(runner, name)
    assert sharing.describe() == runner.describe()


def test_a_batch_that_fails_leaves_its_share(tmp_path, clock):
    def fail(_):
        raise ValueError("boom")

    first, second = (SharedCores.open(tmp_path / "cores", index, 2) for index in range(2))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ValueError, match="boom"):
            SharingRunner(ScriptedRunner(on_launch=fail), first).launch(
                Batch((PoolingRequest(RenderedPrompt(np.ones(3, dtype=np.int32))),))
            )
    finally:
        torch.set_num_threads(threads)
    later(clock)
    assert second.take() == 8

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.model_folder.folder import read_model_folder
from trio_pool_serve.offload import Offload
from trio_pool_serve.runner import shared_cores
from trio_pool_serve.runner.loading import load_runner
from trio_pool_serve.runner.scripted import ScriptedRunner
from trio_pool_serve.runner.shared_cores import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LONELY_S,
    Elbowroom,
    SharedCores,
    SharingRunner,
)
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


def test_crowded_cores_are_left_alone_for_longer_each_time_and_tried_again():
    room = Elbowroom()
    free, crowded = {"took_s": 1.0, "processor_s": 2.0, "threads": 2}, {"took_s": 1.0, "processor_s": 1.0, "threads": 2}
    room.observe(**free, now=0.0)
    assert not room.is_missing(0.0)
    now, pauses = 0.0, []
    for _ in range(10):
        room.observe(**crowded, now=now)
        assert room.is_missing(now)
        begun = now
        while room.is_missing(now):
            now += FIRST_PAUSE_S / 4
        pauses.append(now - begun)
    assert pauses[:4] == [FIRST_PAUSE_S * 2**doubled for doubled in range(4)]
    assert pauses[-2:] == [LAST_PAUSE_S, LAST_PAUSE_S]
    room.observe(**free, now=now)
    room.observe(**crowded, now=now)
    assert not room.is_missing(now + FIRST_PAUSE_S), "what is crowded anew is tried again soon"


BUSY = "print('busy', flush=True)\nwhile True: pass"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is never shared out")
def test_threads_beside_another_program_become_fewer(tmp_path, minilm):
    cores = len(os.sched_getaffinity(0))
    threads, seen = torch.get_num_threads(), []

    class Seeing(SharingRunner):
        def launch(self, batch):
            launched = super().launch(batch)
            seen.append(torch.get_num_threads())
            return launched

    runner = load_runner(read_model_folder(minilm), ModelConfig(device="cpu"), Offload())
    seeing = Seeing(runner, SharedCores.open(tmp_path / "cores", 0, 1))
    batch = Batch(tuple(PoolingRequest(RenderedPrompt(np.full(64, 7, np.int32))) for _ in range(8)))
    others = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(2 * cores)]
    try:
        for other in others:
            assert other.stdout.readline() == b"busy\n"
        while len(seen) < 100 and cores // 2 not in seen:
            seeing.launch(batch)
    finally:
        torch.set_num_threads(threads)
        for other in others:
            other.kill()
            other.communicate()
    assert seen[0] == cores
    assert cores // 2 in seen


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

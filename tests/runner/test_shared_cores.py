"""Replicas that compute on the same cores divide them, and leave them to other programs."""

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.runner import shared_cores
from trio_pool_serve.runner.shared_cores import (
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    PEERS_IDLE_S,
    SharedCores,
    SharingRunner,
    granted_threads,
)
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

BATCH = Batch((PoolingRequest(RenderedPrompt(np.ones(3, dtype=np.int32))),))
PLANNED = Batch((PoolingRequest(RenderedPrompt(np.ones(3, dtype=np.int32)), planned=1),))


@pytest.fixture(autouse=True)
def _threads():
    """Restore torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def two(tmp_path) -> list[SharedCores]:
    return [SharedCores.open(tmp_path / "cores", index, 2) for index in range(2)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [1000.0]
    monkeypatch.setattr(shared_cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 8)
    return now


def later(clock) -> None:
    clock[0] += 2 * PEERS_IDLE_S


def test_a_lone_replica_has_all_cores_and_busy_ones_their_part_until_they_are_replaced(tmp_path, clock):
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
    later(clock)
    assert second.take() == 4
    SharedCores.open(tmp_path / "cores", 2, 3)  # in place of the third, which was killed while it computed
    later(clock)
    assert second.take() == 8


def test_the_runner_computes_with_its_share(tmp_path, clock):
    seen = []
    runner = ScriptedRunner(on_launch=lambda _: seen.append(granted_threads(0)))
    first, second = two(tmp_path)
    sharing = SharingRunner(runner, [first])
    later(clock)
    sharing.launch(BATCH)
    second.take()
    sharing.launch(BATCH)
    assert seen == [8, 4]


def test_crowded_cores_are_left_alone_for_longer_each_time_and_tried_again(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 4)
    spent, free = [0.0], [False]
    monkeypatch.setattr(shared_cores.time, "process_time", lambda: spent[0])
    tried: list[float] = []

    def compute(_):
        clock[0] += 0.02
        spent[0] += 0.02 * granted_threads(0) * (1.0 if free[0] else 0.5)
        if granted_threads(0) == 4:
            tried.append(clock[0])

    sharing = SharingRunner(ScriptedRunner(on_launch=compute), [SharedCores.open(tmp_path / "cores", 0, 1)])

    def compute_for(seconds: float) -> int:
        end, before = clock[0] + seconds, len(tried)
        while clock[0] < end:
            sharing.launch(BATCH)
        return len(tried) - before

    compute_for(120.0)
    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tried)]
    assert [round(pause / MIN_PAUSE_S) for pause in pauses[:4]] == [1, 2, 4, 8]
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S, rel=0.05)
    free[0] = True
    compute_for(MAX_PAUSE_S)
    assert compute_for(1.0) == pytest.approx(50, abs=1), "all cores for every batch"
    free[0] = False
    assert 10 < compute_for(0.4) < 20, "some batches, and not a single one, tell that the cores are not free"
    assert compute_for(1.0) == 2, "after a quarter and a half of a second"


BESIDE_OTHERS = """
import os, subprocess, sys
from pathlib import Path
import numpy as np, torch
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.models.loading.torch_loading import load_unfitted
from trio_pool_serve.runner.shared_cores import SharedCores, SharingRunner, _siblings
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

one_cpu_of_each_core = {_siblings(cpu): cpu for cpu in os.sched_getaffinity(0)}.values()
os.sched_setaffinity(0, sorted(one_cpu_of_each_core)[:2])
config = ModelConfig(device="cpu", backend="torch")
runner = load_unfitted(read_model_folder(Path(sys.argv[1])), config, Offload())()
sharing = SharingRunner(runner, [SharedCores.open(Path(sys.argv[2]), 0, 1)])
batch = Batch(tuple(PoolingRequest(RenderedPrompt(np.full(64, 7, np.int32))) for _ in range(8)))
busy = [sys.executable, "-c", "print('busy', flush=True)\\nwhile True: pass"]
others = [subprocess.Popen(busy, stdout=subprocess.PIPE) for _ in range(4)]
for other in others:
    other.stdout.readline()
threads = []
while len(threads) < 100 and 1 not in threads:
    sharing.launch(batch)
    threads.append(torch.get_num_threads())
for other in others:
    other.kill()
print(threads[0], threads[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    len({shared_cores._siblings(cpu) for cpu in os.sched_getaffinity(0)}) < 2, reason="one core is never shared out"
)
def test_threads_beside_other_programs_become_fewer(tmp_path, minilm):
    command = [sys.executable, "-c", BESIDE_OTHERS, str(minilm), str(tmp_path / "cores")]
    env = {**os.environ, "OMP_NUM_THREADS": ""}  # which counts as cores
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=env)
    assert done.stdout.split() == ["2", "1"]


def test_threads_of_one_process_share_the_cores_while_several_compute(clock):
    together, seen = threading.Barrier(2), []

    def compute(_):
        together.wait(60)
        seen.append(granted_threads(0))
        together.wait(60)

    sharing = SharingRunner(ScriptedRunner(concurrent_launches=2, on_launch=compute), SharedCores.private(2))
    threads = [threading.Thread(target=sharing.launch, args=(BATCH,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [4, 8], "the first had not seen the second"
    assert len(sharing.unused) == 2


def test_a_batch_that_fails_leaves_its_share(tmp_path, clock):
    def fail(_):
        raise ValueError("boom")

    first, second = two(tmp_path)
    with pytest.raises(ValueError, match="boom"):
        SharingRunner(ScriptedRunner(on_launch=fail), [first]).launch(BATCH)
    later(clock)
    assert second.take() == 8


def test_planned_batches_have_the_share_of_each_whoever_computes(tmp_path, clock):
    """However many others compute, and however contended the cores are, such a batch has the same number of threads."""
    seen: list[int] = []
    shared = two(tmp_path)
    runner = ScriptedRunner(on_launch=lambda _: seen.append(granted_threads(0)))
    sharing = SharingRunner(runner, shared[:1])
    sharing.launch(PLANNED)
    shared[1].take()
    sharing.launch(PLANNED)
    sharing.contention.observe(took_s=1.0, cpu_s=0.1, threads=4, now=clock[0])
    sharing.launch(PLANNED)
    assert seen == [4, 4, 4]


def test_planned_batches_at_idle_priority_have_a_thread_each():
    seen: list[int] = []
    runner = ScriptedRunner(background_launches=1, on_launch=lambda _: seen.append(granted_threads(0)))
    torch.set_num_threads(4)
    SharingRunner(runner, unused=[]).launch(PLANNED)
    assert seen == [1]

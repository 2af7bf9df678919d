"""Core contention: the number of threads that a replica computes with on cores that other processes use as well.

OpenMP splits every kernel evenly over its threads and waits for the slowest: two replicas with two threads each on two
cores slow each other down. With one thread each they do not; but then a single busy replica would leave a core idle. So
each replica records when it computes in memory that all of them share, reads the others' times before each batch, and
divides the cores among the busy ones. Other programs on the same cores are recognised by CPU time: threads that waited
for a core have used less CPU time than the batch took.
"""

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.processes.socket_folder import shared_array
from trio_pool_serve.types import Batch, PooledBatch, Runner, RunnerFacts

PEERS_IDLE_S = 0.25
"""A replica uses all cores once no other has computed for this long. Not shorter: when two replicas use all cores
at once, their threads wait for each other, and both take far longer than a batch takes alone."""

CONTENDED_CPU_SHARE = 0.7
"""The cores are contended if the CPU time of batches is below this share of their duration times their threads. It is
0.9 for single short rows on an idle machine (MiniLM, OpenVINO, two cores), and 0.5 with one busy program on two cores;
a batch takes five times as long then."""

REMEMBERED = 0.95
"""Weight of a batch with each later one. When single batches were judged, short interruptions of an otherwise idle
machine halved the threads for most of the time."""

MAX_OBSERVED_THREADS = 4
"""Batches on more threads are not observed: for short rows such threads sleep much of the time in any case."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 16.0
"""Time for which half of the threads are used under contention; doubled while the cores stay contended."""


_granted = threading.local()


def granted_threads(most: int) -> int:
    """Return the number of threads for the calling thread's batch: ``most``, unless cores are shared."""
    return int(getattr(_granted, "threads", most))


def usable_cores() -> int:
    """Return the number of threads with which a lone pass is fastest: one per core, or ``OMP_NUM_THREADS``."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    """Return the hardware threads of the core that one of them belongs to; itself where that is not known."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


@define(eq=False)
class CoreContention:
    """Whether other programs use the cores of this process, judged by the CPU time of its last batches."""

    _cpu_s: float = field(default=0.0, init=False)
    """CPU time of the batches lately, each counting less with every later one."""
    _core_s: float = field(default=0.0, init=False)
    """Their durations times their threads, likewise."""
    contended_until: float = field(default=-math.inf, init=False)
    """Time, in seconds of the clock of ``observe``, until which fewer threads are to be used."""
    _pause_s: float = field(default=MIN_PAUSE_S, init=False)

    def observe(self, *, took_s: float, cpu_s: float, threads: int, now: float) -> None:
        """Record a batch on several threads, which used ``cpu_s`` seconds of CPU time in total."""
        self._cpu_s = REMEMBERED * self._cpu_s + cpu_s
        self._core_s = REMEMBERED * self._core_s + threads * took_s
        if self._cpu_s >= CONTENDED_CPU_SHARE * self._core_s:
            self._pause_s = MIN_PAUSE_S
            return
        self._cpu_s = self._core_s = 0.0  # the next batch on all threads is a trial, and judged alone
        self.contended_until = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)


@define(eq=False)
class SharedCores:
    """The time at which each replica last computed, in shared memory; ``replica`` is the index of this one.

    ``computed_at`` is in seconds of the monotonic clock, which all processes share, and infinity while a replica
    computes. Of a replica that is killed meanwhile, the process that restarts it clears the time.
    """

    computed_at: npt.NDArray[np.float64]
    replica: int
    cores: int

    @classmethod
    def open(cls, path: Path, replica: int, replicas: int) -> "SharedCores":
        """Map the file at ``path``; it is created if it does not exist."""
        cores = cls(shared_array(path, replicas), replica, usable_cores())
        cores.release()
        return cores

    @classmethod
    def private(cls, threads: int) -> list["SharedCores"]:
        """Return one for each thread of this process, which share with no other process."""
        computed_at = np.full(threads, -math.inf)
        return [cls(computed_at, thread, usable_cores()) for thread in range(threads)]

    def take(self) -> int:
        """Record that this replica computes; return its share of the cores, in threads."""
        self.computed_at[self.replica] = math.inf
        return max(1, self.cores // int(np.count_nonzero(self.computed_at > time.monotonic() - PEERS_IDLE_S)))

    def release(self) -> None:
        """Record that this replica has finished computing."""
        self.computed_at[self.replica] = time.monotonic()


@define(eq=False)
class SharingRunner:
    """A runner on CPU that computes each batch with its share of the cores.

    ``unused`` has a ``SharedCores`` for each batch that is computed at a time; other runners may share the list. A
    further batch gets the least share. Planned batches of the same rows give the same bits: these depend on the number
    of threads that torch computes with, which is always the same for them.
    """

    runner: Runner
    unused: list[SharedCores]
    contention: CoreContention = field(init=False, factory=CoreContention)

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch. Raises the errors of ``runner``."""
        if self.facts.background_launches and batch.is_planned:
            return self._compute(batch, 1)  # in the time that others leave, without a share of its own
        try:
            shared = self.unused.pop()
        except IndexError:  # a batch that was taken ahead
            return self._compute(batch, 1)
        share = threads = shared.take()
        began, spent = time.monotonic(), time.process_time()
        if batch.is_planned:
            threads = max(1, shared.cores // len(shared.computed_at))
        elif began < self.contention.contended_until:
            threads = max(1, share // 2)
        try:
            return self._compute(batch, threads)
        finally:
            shared.release()
            self.unused.append(shared)
            if 1 < threads == share <= MAX_OBSERVED_THREADS:
                now = time.monotonic()
                self.contention.observe(took_s=now - began, cpu_s=time.process_time() - spent, threads=threads, now=now)

    def _compute(self, batch: Batch, threads: int) -> PooledBatch:
        _granted.threads = threads
        try:
            return self.runner.launch(batch)
        finally:
            del _granted.threads

    @property
    def facts(self) -> RunnerFacts:
        """The facts of ``runner``."""
        return self.runner.facts

    def return_memory(self) -> None:
        """Free memory as ``runner`` does."""
        self.runner.return_memory()

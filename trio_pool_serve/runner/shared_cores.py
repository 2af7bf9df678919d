"""Replicas that share the cores of a machine: a lone one computes with all of them, busy ones with their share.

OpenMP splits every kernel evenly over its threads, and the slowest of them decides: two replicas with two threads
each on two cores hold each other up. With one thread each they do not; but then one row alone would leave the other
core idle. So each replica writes to memory that all of them see when it computes, and looks at the others' before each
batch. What other programs do nobody writes down, but it shows: threads that had to wait for a core have spent less
processor time than the batch took.
"""

import math
import mmap
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from trio_pool_serve.types import Batch, PooledBatch, QueryScope, Runner

PEERS_IDLE_S = 0.25
"""A replica computes alone once no other has computed for so long. Long, because two that both believe it for a batch
wait for each other's threads, for far longer than the batch takes alone."""

CONTENDED_BELOW = 0.7
"""Share of its threads' time that a batch spends on the processor where others compute on the same cores. It is 1.0
where nobody does, and 0.5 beside one busy program on two cores; the batch takes five times as long then."""

MAX_JUDGED_THREADS = 4
"""With more, those of a short row sleep for much of it in any case, and the share says nothing about others."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 16.0
"""How long half of the cores are left to others then, doubled each time that all turn out to be crowded still."""


@define(eq=False)
class CoreContention:
    """Whether a process has the cores that it computes on to itself, as far as its last batches tell."""

    _crowded_until: float = field(default=-math.inf, init=False)
    _pause_s: float = field(default=FIRST_PAUSE_S, init=False)

    def is_missing(self, now: float) -> bool:
        """Tell whether several threads would wait for each other; ``now`` and below are seconds of one clock."""
        return now < self._crowded_until

    def observe(self, *, took_s: float, processor_s: float, threads: int, now: float) -> None:
        """Take note of a batch on several threads, which spent ``processor_s`` together."""
        if processor_s < CONTENDED_BELOW * threads * took_s:
            self._crowded_until = now + self._pause_s
            self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = FIRST_PAUSE_S


@define(eq=False)
class SharedCores:
    """When each replica last computed, by the clock that all processes share, and which of them is this one.

    One that computes now has infinity there, until it is replaced if it is killed meanwhile.
    """

    computed_at: npt.NDArray[np.float64]
    replica: int
    cores: int

    @classmethod
    def open(cls, path: Path, replica: int, replicas: int) -> "SharedCores":
        """Map the file at ``path``, which is made if it is not there."""
        with path.open("a+b") as file:
            file.truncate(8 * replicas)
            shared = mmap.mmap(file.fileno(), 8 * replicas)
        cores = cls(np.frombuffer(shared, np.float64), replica, len(os.sched_getaffinity(0)))
        cores.release()
        return cores

    def take(self) -> int:
        """Say that this replica computes; return how many threads are its share."""
        self.computed_at[self.replica] = math.inf
        busy = int(np.count_nonzero(self.computed_at > time.monotonic() - PEERS_IDLE_S))
        return max(1, self.cores // busy)

    def release(self) -> None:
        """Say that it has computed."""
        self.computed_at[self.replica] = time.monotonic()


@define(eq=False)
class SharingRunner:
    """A runner on the processor that takes its share of the cores for each batch."""

    runner: Runner
    shared: SharedCores
    contention: CoreContention = field(init=False, factory=CoreContention)
    _threads: int = field(default=0, init=False)

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch. Raises what the runner raises."""
        share = threads = self.shared.take()
        began, spent = time.monotonic(), time.process_time()
        if self.contention.is_missing(began):
            threads = max(1, share // 2)
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads
        try:
            return self.runner.launch(batch)
        finally:
            self.shared.release()
            if 1 < threads == share <= MAX_JUDGED_THREADS:
                now = time.monotonic()
                self.contention.observe(
                    took_s=now - began, processor_s=time.process_time() - spent, threads=threads, now=now
                )

    def describe(self) -> str:
        """One line for people."""
        return self.runner.describe()

    def open_scope(self) -> QueryScope:
        """Return a new place for queries' vectors."""
        return self.runner.open_scope()

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that open scopes hold."""
        return self.runner.held_bytes

    @property
    def dimensions(self) -> int:
        """Length of the vectors when nothing is cut off."""
        return self.runner.dimensions

    @property
    def embeds_width(self) -> int:
        """Width of the token embeddings that rows may bring in place of ids."""
        return self.runner.embeds_width

    @property
    def default_batch_tokens(self) -> int:
        """Padded tokens per batch that suit this device."""
        return self.runner.default_batch_tokens

    @property
    def pads(self) -> bool:
        """Whether padding is computed like tokens are."""
        return self.runner.pads

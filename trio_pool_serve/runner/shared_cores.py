"""Replicas that share the cores of a machine: a lone one computes with all of them, busy ones with their share.

OpenMP splits every kernel evenly over its threads, and the slowest of them decides: two replicas with two threads
each on two cores hold each other up. With one thread each they do not; but then one row alone would leave the other
core idle. So each replica writes to memory that all of them see when it computes, and looks at the others' before each
batch.
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

LONELY_S = 0.25
"""A replica computes alone once no other has computed for so long. Long, because two that both believe it for a batch
wait for each other's threads a hundred times longer than the batch takes alone."""


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
        busy = int(np.count_nonzero(self.computed_at > time.monotonic() - LONELY_S))
        return max(1, self.cores // busy)

    def release(self) -> None:
        """Say that it has computed."""
        self.computed_at[self.replica] = time.monotonic()


@define(eq=False)
class SharingRunner:
    """A runner on the processor that takes its share of the cores for each batch."""

    runner: Runner
    shared: SharedCores
    _threads: int = field(default=0, init=False)

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch. Raises what the runner raises."""
        threads = self.shared.take()
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads
        try:
            return self.runner.launch(batch)
        finally:
            self.shared.release()

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

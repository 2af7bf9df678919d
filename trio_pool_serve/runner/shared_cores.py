"""Replicas that share the cores of a machine: a lone one computes with all of them, busy ones with their share.

OpenMP splits every kernel evenly over its threads, and the slowest of them decides: two replicas with two threads
each on two cores hold each other up. With one thread each they do not; but then one row alone would leave the other
core idle. So each replica says in a byte of memory that all of them see whether it computes, and looks at the others'
before each batch.
"""

import mmap
import os
from pathlib import Path

import torch
from attrs import define, field

from trio_pool_serve.types import Batch, PooledBatch, QueryScope, Runner


@define(eq=False)
class SharedCores:
    """The bytes, one for each replica, and which of them is this process's own."""

    flags: mmap.mmap
    replica: int
    cores: int

    @classmethod
    def open(cls, path: Path, replica: int, replicas: int) -> "SharedCores":
        """Map the file at ``path``, which is made if it is not there; this replica is idle at first."""
        with path.open("a+b") as file:
            file.truncate(replicas)
            flags = mmap.mmap(file.fileno(), replicas)
        flags[replica] = 0
        return cls(flags, replica, len(os.sched_getaffinity(0)))

    def take(self) -> int:
        """Say that this replica computes; return how many threads are its share."""
        self.flags[self.replica] = 1
        return max(1, self.cores // sum(self.flags[:]))

    def release(self) -> None:
        """Say that it does not."""
        self.flags[self.replica] = 0


@define(eq=False)
class SharingRunner:
    """A runner on the processor that takes its share of the cores for each batch."""

    runner: Runner
    shared: SharedCores
    _threads: int = field(default=0, init=False)

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch. Raises what the runner raises."""
        threads = self.shared.take()
        try:
            if threads != self._threads:
                torch.set_num_threads(threads)
                self._threads = threads
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

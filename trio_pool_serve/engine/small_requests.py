"""Counts of the small requests taken by each replica of a model, in memory that all replicas share.

All small requests may go to one replica because the other has more queued. The other would then compute full batches of
bulk, and the first small request that goes to it would wait for one of those. So each replica counts the
small requests that it takes where the others see them, and all keep their batches of bulk short.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define


@define(eq=False)
class SmallRequests:
    """The number of small requests that each replica has taken; ``replica`` is the index of this one."""

    taken: npt.NDArray[np.int64] = Factory(lambda: np.zeros(1, np.int64))
    replica: int = 0

    @classmethod
    def open(cls, path: Path, replica: int, replicas: int) -> "SmallRequests":
        """Map the file at ``path``; it is created if it does not exist."""
        with path.open("a+b") as file:
            file.truncate(8 * replicas)
            shared = mmap.mmap(file.fileno(), 8 * replicas)
        return cls(np.frombuffer(shared, np.int64), replica)

    def increment(self, count: int = 1) -> None:
        """Count small requests taken by this replica."""
        if count:
            self.taken[self.replica] += count

    @property
    def total(self) -> int:
        """Small requests taken by all replicas."""
        return int(self.taken.sum())

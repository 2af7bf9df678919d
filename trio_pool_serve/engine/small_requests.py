"""Small requests that a model's replicas have taken, wherever they were taken.

All small requests may be sent to one replica, because the other has more to do: it would compute full batches of bulk
for as long as none is sent to it, and the first that is would wait for one of those. So each replica counts those that
it takes in memory that all of them see.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define


@define(eq=False)
class SmallRequests:
    """How many small requests each replica has taken, and which of them is this one; by default the only one."""

    taken: npt.NDArray[np.int64] = Factory(lambda: np.zeros(1, np.int64))
    replica: int = 0

    @classmethod
    def open(cls, path: Path, replica: int, replicas: int) -> "SmallRequests":
        """Map the file at ``path``, which is made if it is not there."""
        with path.open("a+b") as file:
            file.truncate(8 * replicas)
            shared = mmap.mmap(file.fileno(), 8 * replicas)
        return cls(np.frombuffer(shared, np.int64), replica)

    def count(self) -> None:
        """Say that this replica has taken one."""
        self.taken[self.replica] += 1

    @property
    def total(self) -> int:
        """How many all of them have taken."""
        return int(self.taken.sum())

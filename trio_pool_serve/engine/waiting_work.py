"""Tokens of admitted requests, counted by all API processes in memory that they share."""

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define

from trio_pool_serve.engine.compute_rates import WORK_CLASSES
from trio_pool_serve.types import Client

CLIENTS = 256
"""Clients that are told apart; two whose numbers are equal modulo this one count as one, in admission only."""

Counts = npt.NDArray[np.float64]
"""Tokens, whole numbers: float64 because they are multiplied by rates."""


@define(eq=False)
class WaitingWork:
    """Tokens of the admitted requests of one model, by client and work class. ``worker`` is this process's index.

    Each process writes its own part only, and a number at a time: nothing has to be locked. Behind those of the clients
    each part has their sums.
    """

    counts: Counts = Factory(lambda: np.zeros((1, CLIENTS + 1, WORK_CLASSES)))
    worker: int = 0

    @classmethod
    def open(cls, path: Path, worker: int, workers: int) -> "WaitingWork":
        """Map the file at ``path``, which is created if need be; what a process before counted is dropped."""
        shape = workers, CLIENTS + 1, WORK_CLASSES
        nbytes = 8 * math.prod(shape)
        with path.open("a+b") as file:
            file.truncate(nbytes)
            shared = mmap.mmap(file.fileno(), nbytes)
        counts: Counts = np.frombuffer(shared, np.float64).reshape(shape)
        counts[worker] = 0
        return cls(counts, worker)

    def add(self, client: Client, work_class: int, tokens: int) -> None:
        """Count ``tokens`` more of a client, or fewer if negative."""
        own = self.counts[self.worker]
        own[client.number % CLIENTS, work_class] += tokens
        own[CLIENTS, work_class] += tokens

    def by_client(self) -> Counts:
        """Return the tokens of all processes: shape (``CLIENTS``, ``WORK_CLASSES``)."""
        total: Counts = self.counts[0] if len(self.counts) == 1 else self.counts.sum(axis=0)
        return total[:CLIENTS]

    def total(self) -> Counts:
        """Return the tokens of all clients and processes: shape (``WORK_CLASSES``,)."""
        sums: Counts = self.counts[0, CLIENTS] if len(self.counts) == 1 else self.counts[:, CLIENTS].sum(axis=0)
        return sums

    @property
    def own_tokens(self) -> int:
        """Tokens of the requests that this process has admitted."""
        return int(self.counts[self.worker, CLIENTS].sum())

"""Tokens of admitted requests, counted by all API processes in memory that they share."""

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define

from trio_pool_serve.engine.compute_rates import WORK_CLASSES

CLIENTS = 256
"""Clients that are told apart; two whose numbers are equal modulo this one count as one, in admission only."""

SIZES = 24
"""Octaves of request size that are told apart; the last has all requests of more than 2²² tokens."""

REQUESTS = WORK_CLASSES
"""In place of a work class: the number of requests."""

SHAPE = SIZES + 1, CLIENTS + 1, WORK_CLASSES + 1
"""Shape of one process's counts."""

Counts = npt.NDArray[np.float64]
"""Tokens, whole numbers: float64 because they are multiplied by rates."""


@define(eq=False)
class WaitingWork:
    """Tokens of the admitted requests of one model, by request size, client and work class.

    In ``counts``, shape (processes, *``SHAPE``), index ``SIZES`` has the sums over sizes, and there index ``CLIENTS``
    those over clients, too. A process writes only ``counts[worker]``: nothing has to be locked.
    """

    counts: Counts = Factory(lambda: np.zeros((1, *SHAPE)))
    worker: int = 0

    @classmethod
    def open(cls, path: Path, worker: int, workers: int) -> "WaitingWork":
        """Map the file at ``path``, created if it is missing, and reset the counts of ``worker`` to 0."""
        shape = workers, *SHAPE
        nbytes = 8 * math.prod(shape)
        with path.open("a+b") as file:
            file.truncate(nbytes)
            shared = mmap.mmap(file.fileno(), nbytes)
        counts: Counts = np.frombuffer(shared, np.float64).reshape(shape)
        counts[worker] = 0
        return cls(counts, worker)

    def add(self, size: int, client: int, work_class: int, tokens: int) -> None:
        """Count ``tokens`` more of a client's requests of one size, or fewer if negative; so with ``REQUESTS``."""
        own = self.counts[self.worker]
        own[size, client % CLIENTS, work_class] += tokens
        own[SIZES, client % CLIENTS, work_class] += tokens
        own[SIZES, CLIENTS, work_class] += tokens

    def by_client(self) -> Counts:
        """Return the tokens of all processes: shape (``CLIENTS``, ``WORK_CLASSES``)."""
        sums: Counts = self.counts[:, SIZES, :CLIENTS, :WORK_CLASSES].sum(axis=0)
        return sums

    def by_size(self, client: int) -> Counts:
        """Return a client's tokens of all processes, and its ``REQUESTS``: shape (``SIZES``, ``WORK_CLASSES`` + 1)."""
        sums: Counts = self.counts[:, :SIZES, client % CLIENTS].sum(axis=0)
        return sums

    def total(self) -> Counts:
        """Return the tokens of all clients and processes: shape (``WORK_CLASSES``,)."""
        counts = self.counts[:, SIZES, CLIENTS, :WORK_CLASSES]
        sums: Counts = counts[0] if len(counts) == 1 else counts.sum(axis=0)
        return sums

    @property
    def own_tokens(self) -> int:
        """Tokens of the requests that this process has admitted."""
        return int(self.counts[self.worker, SIZES, CLIENTS, :WORK_CLASSES].sum())


def size_of(tokens: int) -> int:
    """Return the request size of ``tokens``: the exponent of the next power of two, at most ``SIZES`` - 1."""
    return min((max(tokens, 1) - 1).bit_length(), SIZES - 1)

"""How many replicas a model needs, by the time that its admitted work will take."""

import math
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field

UP_AFTER_S = 2.0
"""For so long the queue is too long before replicas are added."""

MAX_GROWTH = 2
"""Replicas are at most doubled, before the new ones take a part of the queue."""

NEXT_TO_NO_QUEUE = 0.1
"""Share of ``up_queue_s`` below which the queue would have to be with one replica fewer."""


@define(eq=False)
class QueueScaling:
    """The number of replicas, ``wanted``, from ``least`` to ``most``.

    Replicas are added when what waits would take longer than ``up_queue_s`` seconds for ``UP_AFTER_S``: as many as
    would make it that long, at most as many as there are. None is added while others are being started. One is taken
    away when with one fewer there would have been next to no queue for ``down_after_s`` seconds, in which the number
    did not change.
    """

    least: int
    most: int
    up_queue_s: float
    down_after_s: float
    wanted: int = field(init=False, default=Factory(lambda self: self.least, takes_self=True))
    _long_since: float = field(init=False, default=math.inf)
    _short_since: float = field(init=False, default=math.inf)

    def update(self, now: float, waiting_s: float, ready: int) -> int:
        """Return the number of replicas at a time (seconds), when ``ready`` of them need ``waiting_s`` for all work."""
        is_long = waiting_s > self.up_queue_s and ready >= self.wanted < self.most
        fewer = self.wanted - 1
        is_short = fewer >= self.least and waiting_s * ready <= NEXT_TO_NO_QUEUE * self.up_queue_s * fewer
        self._long_since = min(self._long_since, now) if is_long else math.inf
        self._short_since = min(self._short_since, now) if is_short else math.inf
        if now - self._long_since >= UP_AFTER_S:
            needed = math.ceil(ready * waiting_s / self.up_queue_s)
            self._change(min(self.most, max(self.wanted + 1, min(needed, MAX_GROWTH * self.wanted))))
        elif now - self._short_since >= self.down_after_s:
            self._change(fewer)
        return self.wanted

    def _change(self, wanted: int) -> None:
        self.wanted = wanted
        self._long_since = self._short_since = math.inf


@define(eq=False)
class QueueSeconds:
    """The seconds that a model's admitted work will take, as each API process estimates, in memory that they share."""

    seconds: npt.NDArray[np.float64]

    @classmethod
    def open(cls, path: Path, workers: int) -> "QueueSeconds":
        """Map the file at ``path``, which is created if need be."""
        with path.open("a+b") as file:
            file.truncate(8 * workers)
            return cls(np.frombuffer(mmap.mmap(file.fileno(), 8 * workers), np.float64))

    @property
    def longest(self) -> float:
        """The longest estimate: all of them count the work of all processes."""
        return float(self.seconds.max())

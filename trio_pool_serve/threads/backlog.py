"""How long work takes that waits for threads, first come, first served: measured as it is done."""

import time
from collections.abc import Callable

from attrs import define, field

WEIGHT = 0.1
"""Of the newest time in the average."""

MIN_WAITING = 4
"""Items that must be waiting for the time until one of them is done to tell how fast all are."""

MAX_OUTLIER = 4.0
"""A time counts with at most this many times the average: one image may be fetched for seconds."""


@define(eq=False)
class Backlog:
    """Items that are not done yet, and how long it takes from one that is done to the next while several wait."""

    clock: Callable[[], float] = time.perf_counter
    waiting: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    """A moving average; 0 before the first."""
    _last: float | None = field(default=None, init=False)
    """When one was done, and others were left waiting."""

    @property
    def waiting_s(self) -> float:
        """Seconds until all of them are done; 0 while it is unknown how long one takes."""
        return self.waiting * self._seconds

    def add(self, items: int = 1) -> None:
        """Count items that wait."""
        self.waiting += items

    def withdraw(self, items: int = 1) -> None:
        """Count items no longer, that were not done."""
        self.waiting -= items

    def note_done(self, items: int = 1) -> None:
        """Count items no longer, that are done."""
        now = self.clock()
        if self._last is not None and items:
            seconds = (now - self._last) / items
            if self._seconds:
                self._seconds += WEIGHT * (min(seconds, MAX_OUTLIER * self._seconds) - self._seconds)
            else:
                self._seconds = seconds
        self.waiting -= items
        self._last = now if self.waiting >= MIN_WAITING else None

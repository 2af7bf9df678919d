"""How long work takes that waits for threads, first come, first served: measured as it is done."""

import time
from collections.abc import Callable

from attrs import define, field

WEIGHT = 0.3
"""Of the newest period in the average."""

PERIOD_S = 0.25
"""Over which items are counted: several may be done at once as far as a busy event loop can tell."""

MIN_WAITING = 4
"""Items that must be waiting all the time for a period to tell how fast they are done."""


@define(eq=False)
class Backlog:
    """Items that are not done yet, and how long each takes while several wait."""

    clock: Callable[[], float] = time.perf_counter
    waiting: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    """For each item: a moving average; 0 before the first period."""
    _since: float | None = field(default=None, init=False)
    """When the period began; ``None`` while too few wait."""
    _done: int = field(default=0, init=False)
    """In the period."""

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
        self.waiting -= items
        self._done += items
        if self._since is not None and self._done and now >= self._since + PERIOD_S:
            seconds = (now - self._since) / self._done
            self._seconds += (seconds - self._seconds) * (WEIGHT if self._seconds else 1.0)
            self._since = None
        if self.waiting < MIN_WAITING:
            self._since = None
        elif self._since is None:
            self._since, self._done = now, 0

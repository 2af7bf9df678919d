"""How long work takes that waits for threads: measured as it is done."""

import math
import time
from collections import Counter
from collections.abc import Callable

from attrs import define, field

WEIGHT = 0.3
"""Of the newest period in the average."""

PERIOD_S = 0.25
"""Over which items are counted: several may be done at once as far as a busy event loop can tell."""

MIN_WAITING = 4
"""Items that must be waiting all the time for a period to tell how fast they are done."""

MIN_COUNTED = 2 * MIN_WAITING
"""Fewer items than this count as no wait: what they take would not be measured, and so not be corrected."""

FORGOTTEN_AFTER_S = 10.0
"""Without a period, after which the average is forgotten."""


@define(eq=False)
class Backlog:
    """Items that are not done yet, by client, and how long each takes while several wait."""

    clock: Callable[[], float] = time.perf_counter
    waiting: Counter[int] = field(init=False, factory=Counter)
    """By the number of the client."""
    total: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    """For each item: a moving average."""
    _measured: float = field(default=-math.inf, init=False)
    """When the latest period ended."""
    _since: float | None = field(default=None, init=False)
    """When the period began; ``None`` while too few wait."""
    _done: int = field(default=0, init=False)
    """In the period."""

    @property
    def total_s(self) -> float:
        """Seconds until all of them are done; 0 while it is unknown how long one takes, and for a few."""
        return self.total * self._seconds if self._is_known else 0.0

    def wait_s(self, client: int, items: int = 1) -> float:
        """Return how many seconds it takes until so many more items of a client are begun, if clients take turns.

        0 while it is unknown how long one takes, and while a few wait.
        """
        if not self._is_known:
            return 0.0
        own = self.waiting[client]
        others = sum(min(count, own + items) for other, count in self.waiting.items() if other != client)
        return (own + others) * self._seconds

    @property
    def _is_known(self) -> bool:
        return self.total >= MIN_COUNTED and self.clock() < self._measured + FORGOTTEN_AFTER_S

    def add(self, client: int, items: int = 1) -> None:
        """Count items that wait."""
        self.total += items
        self.waiting[client] += items

    def withdraw(self, client: int, items: int = 1) -> None:
        """Count items no longer, that were not done. A period begins anew: how long they took tells nothing."""
        self._remove(client, items)
        self._since = None

    def note_done(self, client: int, items: int = 1) -> None:
        """Count items no longer, that are done."""
        now = self.clock()
        self._remove(client, items)
        self._done += items
        if self._since is not None and self._done and now >= self._since + PERIOD_S:
            seconds = (now - self._since) / self._done
            is_first = now >= self._measured + FORGOTTEN_AFTER_S
            self._seconds = seconds if is_first else self._seconds + WEIGHT * (seconds - self._seconds)
            self._measured, self._since = now, None
        if self.total < MIN_WAITING:
            self._since = None
        elif self._since is None:
            self._since, self._done = now, 0

    def _remove(self, client: int, items: int) -> None:
        self.total -= items
        self.waiting[client] -= items
        if not self.waiting[client]:
            del self.waiting[client]

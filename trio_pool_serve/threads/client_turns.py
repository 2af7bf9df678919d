"""Clients take turns for threads, so that no client's work delays the others'; and how long work waits for threads."""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain, count

import trio
from attrs import define, field, frozen

from trio_pool_serve.threads.moving_average import MovingAverage

WEIGHT = 0.3
"""Weight of the newest period in the average of seconds per item."""

PERIOD_S = 0.25
"""Period over which items are counted: to a busy event loop, several may seem to be done at once."""

MIN_WAITING = 4
"""Items that must wait throughout a period for it to tell how fast they are done."""

MIN_COUNTED = 2 * MIN_WAITING
"""Fewer items count as no wait: how long they take would not be measured, so an estimate would not be corrected."""

FORGOTTEN_AFTER_S = 10.0
"""The average is forgotten after this long without a period."""


class ClientCounts(Counter[int]):
    """A number for each client; 0 is not stored."""

    def add(self, client: int, number: int) -> None:
        """Add to a client's number."""
        self[client] += number
        if not self[client]:  # clients come and go: their zeros would be kept forever
            del self[client]


@frozen
class LimiterStatistics:
    """The use of one limiter: all tokens, borrowed tokens, waiting tasks."""

    capacity: int
    borrowed: int
    waiting: int

    def __str__(self) -> str:
        return f"{self.borrowed}/{self.capacity}+{self.waiting}"


@define(eq=False)
class ClientTurns:
    """Lets at most ``slots`` tasks work at a time: a client's tasks in the order of their numbers, and clients in turn.

    No client has more than ``slots_per_client`` at a time, however long its tasks take. A client is a number. The
    number of a task is unique; by default, tasks are numbered in the order of arrival.
    """

    slots: int
    slots_per_client: int
    _working: ClientCounts = field(init=False, factory=ClientCounts)
    _waiting: dict[int, list[tuple[int, trio.Event]]] = field(init=False, factory=dict)
    """Maps a client to the number of each task and an event, set when its turn comes. The next turn goes to the first
    client without a task at work; if there is none, to the first with fewer tasks than slots."""
    _numbers: "count[int]" = field(init=False, factory=count)

    @property
    def working(self) -> int:
        """Number of tasks whose turn it is."""
        return self._working.total()

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def statistics(self) -> LimiterStatistics:
        """Return the current use of the slots."""
        return LimiterStatistics(self.slots, self.working, self.waiting)

    @asynccontextmanager
    async def turn(self, client: int, number: int | None = None) -> AsyncIterator[None]:
        """Run the block in a turn. Cancellation: at once while waiting; the turn goes to the next task."""
        await self.wait_for_turn(client, number)
        try:
            yield
        finally:
            self.pass_on(client)

    async def wait_for_turn(self, client: int, number: int | None = None) -> None:
        """Wait for a turn, which ends with ``pass_on``. Cancellation: as ``turn``."""
        # This overtakes no one: while a waiting client may have a slot, `pass_on` leaves none free.
        if self.working < self.slots and self._working[client] < self.slots_per_client:
            self._working[client] += 1
            return
        turn = trio.Event()
        # Sorted rather than appended: a caller's own numbers may say that a later task is the client's next.
        # Numbers are unique, so events, which have no order, are never compared.
        place = next(self._numbers) if number is None else number, turn
        insort(self._waiting.setdefault(client, []), place)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():  # in the same round of the event loop, before this task ran
                self.pass_on(client)
            else:
                self._waiting[client].remove(place)
                if not self._waiting[client]:
                    del self._waiting[client]
            raise

    def step_back(self, client: int) -> bool:
        """Put a client at the end of the line, if it waits; return whether others wait."""
        if tasks := self._waiting.pop(client, None):  # an empty list is a client that waits no more
            self._waiting[client] = tasks  # a dictionary is ordered by insertion: now it is the last
        return any(other != client for other in self._waiting)

    def pass_on(self, client: int) -> None:
        """Free a client's slot, and give it to the next waiting client, which then goes to the end of the line."""
        self._working.add(client, -1)
        # A client with a task at work comes after clients without one, however long its tasks take.
        idle = (each for each in self._waiting if not self._working[each])
        able = (each for each in self._waiting if self._working[each] < self.slots_per_client)
        following = next(chain(idle, able), None)
        if following is None:
            return
        _, turn = self._waiting[following].pop(0)
        self.step_back(following)
        self._working[following] += 1  # now, not when the task runs: another turn may be passed on before
        turn.set()


@frozen(eq=False)
class TurnLimiter:
    """A limiter for threads that work in a client's turn, which lasts until they end, even after cancellation."""

    turns: ClientTurns
    client: int

    async def acquire_on_behalf_of(self, borrower: object) -> None:  # noqa: ARG002  (trio passes it)
        """Wait for a turn. Cancellation: as ``ClientTurns.turn``."""
        await self.turns.wait_for_turn(self.client)

    def release_on_behalf_of(self, borrower: object) -> None:  # noqa: ARG002
        """End the turn."""
        self.turns.pass_on(self.client)


@define(eq=False)
class Backlog:
    """Items that are not done yet, by client, and the seconds that each takes while several wait."""

    clock: Callable[[], float] = time.perf_counter
    waiting: ClientCounts = field(init=False, factory=ClientCounts)
    total: int = field(default=0, init=False)
    _item_s: MovingAverage = field(init=False, factory=lambda: MovingAverage(WEIGHT))
    """Seconds per item."""
    _measured: float = field(default=-math.inf, init=False)
    """Time at which the latest period ended."""
    _since: float = field(default=math.inf, init=False)
    """Time at which the period began; infinite while too few items wait."""
    _done: int = field(default=0, init=False)
    """Items that were done in the period."""

    @property
    def total_s(self) -> float:
        """Seconds until all items are done; 0 if fewer than ``MIN_COUNTED`` wait, or nothing was measured lately."""
        return self.total * self._item_s.value if self._is_known else 0.0

    def wait_s(self, client: int, items: int = 1) -> float:
        """Return the seconds until ``items`` more items of a client are begun, if clients take turns.

        0 if fewer than ``MIN_COUNTED`` wait, or nothing was measured lately.
        """
        if not self._is_known:
            return 0.0
        own = self.waiting[client]
        # While its own items take their turns, another client has no more turns than that.
        others = sum(min(count, own + items) for other, count in self.waiting.items() if other != client)
        return (own + others) * self._item_s.value

    @property
    def _is_known(self) -> bool:
        return self.total >= MIN_COUNTED and self.clock() < self._measured + FORGOTTEN_AFTER_S

    def add(self, client: int, items: int = 1) -> None:
        """Count items that wait, or no longer wait if negative."""
        self.total += items
        self.waiting.add(client, items)

    def withdraw(self, client: int, items: int = 1) -> None:
        """Stop counting items that were not done. The period starts over: it cannot tell how long they took."""
        self.add(client, -items)
        self._since = math.inf

    def note_done(self, client: int, items: int = 1) -> None:
        """Stop counting items that are done."""
        now = self.clock()
        self.add(client, -items)
        self._done += items
        if self._done and now >= self._since + PERIOD_S:
            # After a pause, the machine or the items may be others: the first period replaces what was known.
            self._item_s.is_known = now < self._measured + FORGOTTEN_AFTER_S
            self._item_s.observe((now - self._since) / self._done)
            self._measured, self._since = now, math.inf
        if self.total < MIN_WAITING:  # threads that had nothing to do would count as slow ones
            self._since = math.inf
        elif math.isinf(self._since):
            self._since, self._done = now, 0

"""Turns of clients: what one client has waiting for threads does not delay what others have."""

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

import trio
from attrs import define, field, frozen


@define(eq=False)
class ClientTurns:
    """Lets at most ``slots`` tasks work at a time: those of a client in the order of arrival, and the clients in turn.

    No client has more than ``slots_per_client`` at a time, however long its tasks take. Clients are told apart by a
    number.
    """

    slots: int
    slots_per_client: int
    _working: Counter[int] = field(init=False, factory=Counter)
    """By client."""
    _waiting: dict[int, deque[trio.Event]] = field(init=False, factory=dict)
    """By client, an event for each task, set when its turn comes; the first client that has no task at work, or else
    fewer than its slots, has the next turn."""

    @property
    def working(self) -> int:
        """Number of tasks whose turn it is."""
        return self._working.total()

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: int) -> AsyncIterator[None]:
        """Work in the block. Cancellation: at once while waiting for the turn, which the next one has then."""
        await self.wait_for_turn(client)
        try:
            yield
        finally:
            self.pass_on(client)

    async def wait_for_turn(self, client: int) -> None:
        """Wait for a turn, which ends with ``pass_on``. Cancellation: as ``turn``."""
        if self.working < self.slots and self._working[client] < self.slots_per_client:
            self._working[client] += 1
            return
        turn = trio.Event()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self.pass_on(client)
            else:
                self._withdraw(client, turn)
            raise

    def pass_on(self, client: int) -> None:
        """Free a client's slot, and give it to the next client that waits, whose next turn is behind all others."""
        self._working[client] -= 1
        if not self._working[client]:
            del self._working[client]
        idle = (each for each in self._waiting if not self._working[each])
        able = (each for each in self._waiting if self._working[each] < self.slots_per_client)
        following = next(chain(idle, able), None)
        if following is None:
            return
        queue = self._waiting.pop(following)
        turn = queue.popleft()
        if queue:
            self._waiting[following] = queue
        self._working[following] += 1
        turn.set()

    def _withdraw(self, client: int, turn: trio.Event) -> None:
        queue = self._waiting[client]
        queue.remove(turn)
        if not queue:
            del self._waiting[client]


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

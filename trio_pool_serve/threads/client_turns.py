"""Turns of clients: what one client has waiting for threads does not delay what others have."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import define, field

from trio_pool_serve.threads.backlog import Backlog


@define(eq=False)
class Waiting:
    """One task that waits for its turn."""

    granted: bool = False
    event: trio.Event = field(factory=trio.Event)


@define(eq=False)
class ClientTurns:
    """Lets at most ``slots`` tasks work at a time: those of a client in the order of arrival, and the clients in turn.

    Clients are told apart by a number. ``backlog`` counts the tasks that wait or work.
    """

    slots: int
    backlog: Backlog = field(factory=Backlog)
    _working: int = field(default=0, init=False)
    _waiting: dict[int, deque[Waiting]] = field(init=False, factory=dict)
    """By client; the first one has the next turn."""

    @asynccontextmanager
    async def turn(self, client: int) -> AsyncIterator[None]:
        """Work in the block. Cancellation: at once while waiting for the turn, which the next one has then."""
        self.backlog.add(client)
        is_done = False
        try:
            await self._wait_for_turn(client)
            try:
                yield
                is_done = True
            finally:
                self._pass_on()
        finally:
            if is_done:
                self.backlog.note_done(client)
            else:
                self.backlog.withdraw(client)

    async def _wait_for_turn(self, client: int) -> None:
        if self._working < self.slots:
            self._working += 1
            return
        waiting = Waiting()
        self._waiting.setdefault(client, deque()).append(waiting)
        try:
            await waiting.event.wait()
        except trio.Cancelled:
            if waiting.granted:
                self._pass_on()
            else:
                self._withdraw(client, waiting)
            raise

    def _pass_on(self) -> None:
        """Give a slot to the next client that waits, which has its next turn behind all others."""
        if not self._waiting:
            self._working -= 1
            return
        client = next(iter(self._waiting))
        queue = self._waiting.pop(client)
        waiting = queue.popleft()
        if queue:
            self._waiting[client] = queue
        waiting.granted = True
        waiting.event.set()

    def _withdraw(self, client: int, waiting: Waiting) -> None:
        queue = self._waiting[client]
        queue.remove(waiting)
        if not queue:
            del self._waiting[client]

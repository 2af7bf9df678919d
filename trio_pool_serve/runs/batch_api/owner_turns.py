"""Turns of owners: the batches of one wait for each other, and not those of another for all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import trio
from attrs import define, field


@define(eq=False)
class OwnerTurns:
    """Lets one task work at a time: of the owner who has waited longest, the one with the smallest number."""

    _working: str | None = field(default=None, init=False)
    _waiting: dict[str, dict[int, trio.Event]] = field(init=False, factory=dict)
    """By owner and number."""
    _served: dict[str, int] = field(init=False, factory=dict)
    """When each waiting owner was served last, in turns."""
    _turns: "count[int]" = field(init=False, factory=lambda: count(1))

    @asynccontextmanager
    async def turn(self, owner: str, number: int) -> AsyncIterator[None]:
        """Work in the block. ``number`` is unique. Cancellation: at once while waiting for the turn."""
        if self._working is None:
            self._working = owner
        else:
            await self._wait(owner, number)
        try:
            yield
        finally:
            self._pass_on()

    @property
    def is_taken(self) -> bool:
        """Whether a task works."""
        return self._working is not None

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def is_wanted_by_others(self, owner: str) -> bool:
        """Whether another owner waits for a turn."""
        return any(other != owner for other in self._waiting)

    async def _wait(self, owner: str, number: int) -> None:
        event = self._waiting.setdefault(owner, {})[number] = trio.Event()
        try:
            await event.wait()
        except trio.Cancelled:  # it has no turn: a task whose event is set is not cancelled while it waits for that
            self._remove(owner, number)
            raise

    def _remove(self, owner: str, number: int) -> trio.Event:
        event = self._waiting[owner].pop(number)
        if not self._waiting[owner]:
            del self._waiting[owner]
        return event

    def _pass_on(self) -> None:
        """Give the turn to the next that waits."""
        if self._working is not None:
            self._served[self._working] = next(self._turns)
        if not self._waiting:
            self._working = None
            self._served.clear()
            return
        owner = min(self._waiting, key=lambda waiting: self._served.get(waiting, 0))
        self._working = owner
        self._remove(owner, min(self._waiting[owner])).set()

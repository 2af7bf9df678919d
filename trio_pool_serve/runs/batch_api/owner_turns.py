"""Turns of owners: the batches of one wait for each other, and not those of another for all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import trio
from attrs import define, field


@define(eq=False)
class OwnerTurns:
    """Lets one task work at a time: of the owner who has waited longest, the one with the smallest number."""

    working: str | None = field(default=None, init=False)
    """The owner whose task works."""
    waiting: dict[tuple[str, int], trio.Event] = field(init=False, factory=dict)
    """By owner and number, the tasks that wait for their turn."""
    _served: dict[str, int] = field(init=False, factory=dict)
    """When each waiting owner was served last, in turns."""
    _turns: "count[int]" = field(init=False, factory=lambda: count(1))

    @asynccontextmanager
    async def turn(self, owner: str, number: int) -> AsyncIterator[None]:
        """Work in the block. ``number`` is unique.

        Cancellation: at once while waiting; a turn that has just been given goes to the next task.
        """
        if self.working is not None:
            event = self.waiting[owner, number] = trio.Event()
            try:
                await event.wait()
            except trio.Cancelled:
                # The event of a task that is being cancelled can still be set.
                if self.waiting.pop((owner, number), None) is None:
                    self._pass_on()
                raise
        self.working = owner
        try:
            yield
        finally:
            self._served[owner] = next(self._turns)
            self._pass_on()

    def is_wanted_by_others(self, owner: str) -> bool:
        """Whether another owner waits for a turn."""
        return any(other != owner for other, _ in self.waiting)

    def _pass_on(self) -> None:
        """Give the turn to the next that waits."""
        if not self.waiting:
            self.working = None
            self._served.clear()
            return
        self.working, _ = min(self.waiting, key=lambda waiting: self._served.get(waiting[0], 0))
        number = min(number for owner, number in self.waiting if owner == self.working)
        self.waiting.pop((self.working, number)).set()

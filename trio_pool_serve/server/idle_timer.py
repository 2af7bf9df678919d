"""Closes a connection on which nothing has been asked for too long."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import define, field

CLOSING_S = 5.0
"""Seconds that closing may take; nobody is served on the connection any more."""


@define(eq=False)
class IdleTimer:
    """In the place of hypercorn's ``SingleTask``: one task for a connection's life, not one for each request.

    ``wait_for_shutdown()`` returns once the server takes no more connections: idle ones are closed then.
    """

    timeout_s: float
    wait_for_shutdown: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    _scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    _idle: trio.Event = field(init=False, factory=trio.Event)
    _is_watching: bool = field(default=False, init=False)
    _has_ended: bool = field(default=False, init=False)

    async def restart(self, task_group: Any, action: object) -> None:
        """Say that the connection is idle from now on; ``action`` is what hypercorn would do. Cancellation: none."""
        del action
        self._idle.set()
        self._scope.deadline = trio.current_time() + self.timeout_s
        if not self._is_watching:
            self._is_watching = True
            task_group.spawn(self._watch)

    async def stop(self) -> None:
        """Say that the connection is busy. Cancellation: none."""
        self._idle = trio.Event()
        self._scope.deadline = math.inf

    def end(self) -> None:
        """Watch no longer: the connection ends by itself."""
        self._has_ended = True
        self._scope.cancel(reason="the connection ends by itself")

    async def _watch(self) -> None:
        while not self._has_ended:
            with self._scope:
                await self.wait_for_shutdown()
                await self._idle.wait()
            if self._idle.is_set() and not self._has_ended:
                with trio.move_on_after(CLOSING_S, shield=True):
                    await self.close()
                return
            # A request has come just as the time was over.
            self._scope = trio.CancelScope()

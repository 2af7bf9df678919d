"""Closes a connection that has been idle for too long."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import define, field

CLOSE_TIMEOUT_S = 5.0
"""Seconds that closing may take; no request is running on the connection."""


@define(eq=False)
class IdleTimer:
    """Closes a connection that is idle for ``timeout_s`` seconds, by one task per connection.

    It replaces hypercorn's ``SingleTask``, which starts one task per request. ``wait_for_shutdown()`` returns once the
    server accepts no more connections: idle ones are closed then.
    """

    timeout_s: float
    wait_for_shutdown: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    _scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    _idle: trio.Event = field(init=False, factory=trio.Event)
    _is_watching: bool = field(default=False, init=False)
    _has_ended: bool = field(default=False, init=False)

    async def restart(self, task_group: Any, action: object) -> None:
        """Start measuring: the connection is idle. ``action``, hypercorn's own, is not used. Cancellation: none."""
        del action
        self._idle.set()
        self._scope.deadline = trio.current_time() + self.timeout_s
        if not self._is_watching:
            self._is_watching = True
            task_group.spawn(self._watch)

    async def stop(self) -> None:
        """Stop measuring: the connection is busy. Cancellation: none."""
        self._idle = trio.Event()
        self._scope.deadline = math.inf

    def end(self) -> None:
        """End the task of the timer: the connection ends by itself."""
        self._has_ended = True
        self._scope.cancel(reason="the connection ends by itself")

    async def _watch(self) -> None:
        while not self._has_ended:
            with self._scope:
                await self.wait_for_shutdown()
                await self._idle.wait()
            if self._idle.is_set() and not self._has_ended:
                with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await self.close()
                return
            # A request has arrived just as the timeout expired.
            self._scope = trio.CancelScope()

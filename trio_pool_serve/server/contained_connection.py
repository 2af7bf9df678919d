"""Connections of hypercorn's whose exceptions are contained, and which end when either side closes them.

hypercorn serves all connections of a worker in one nursery, and some clients can make its protocol code raise: HTTP/2
frames after the end of a response, bytes after a websocket handshake. The exception would cancel all other connections.
And a client that disconnects just as its response is finished can leave a connection open that is not read any more,
for the whole keep-alive time. A connection that is closed behind the last response of a server that shuts down waits
for another request, until the server stops waiting for it.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.trio.run
import trio
from attrs import define, field
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer

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


logger = logging.getLogger(__name__)

JOINED_BELOW = 64 * 1024
"""Bytes: smaller bodies are copied behind their response's head, to send both by one system call."""


class ContainedConnection(TCPServer):
    """hypercorn's connection; an exception ends only this connection, and the client's disconnect ends it, too.

    Per request it makes one system call and no new task, where hypercorn makes three and one: the head of a response
    of known length waits for its body, and one timer per connection measures how long it is idle. Requests to a bare
    app take 1.30 times the CPU time without the first, 1.36 without the second
    (``benchmarks/results/connection_costs.md``).
    """

    _client_is_gone = False
    _head = b""
    _reading: trio.CancelScope

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reading = trio.CancelScope()
        self.idle_timer = IdleTimer(
            self.config.keep_alive_timeout, self.context.terminated.wait, self._initiate_server_close
        )
        self.idle_task = self.idle_timer  # type: ignore[assignment]  # has the same methods

    async def run(self) -> None:
        """Serve the connection until it is closed. Cancellation: as in hypercorn."""
        try:
            await super().run()
        except Exception as error:
            # Not a cancellation: a group with ``trio.Cancelled`` is a ``BaseExceptionGroup``, not an ``Exception``.
            logger.warning("a connection failed: %r", error)
            logger.debug("traceback of the failed connection", exc_info=error)

    async def protocol_send(self, event: Event) -> None:
        """Handle an event of the protocol. Cancellation: as in hypercorn."""
        if isinstance(event, RawData):
            await self._send(event.data)
            return
        await super().protocol_send(event)
        if isinstance(event, Closed):
            self._reading.cancel(reason="the server has closed the connection")
        if isinstance(event, Updated) and self._client_is_gone:
            self.idle_timer.end()

    async def _send(self, data: bytes) -> None:
        if not self._head and _is_head_of_known_length(data):
            self._head = data  # another event always follows, at least the end of the body
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) < JOINED_BELOW:
                data = head + data
            else:
                await super().protocol_send(RawData(head))
        if data:
            await super().protocol_send(RawData(data))

    async def _read_data(self) -> None:
        with self._reading:
            await super()._read_data()
        self._client_is_gone = True
        self.idle_timer.end()


def _is_head_of_known_length(data: bytes) -> bool:
    """Return whether ``data`` is the head of a final response with a ``Content-Length``: its body follows at once.

    False for a response that closes the connection: hypercorn writes some of those without a body.
    """
    if not data.startswith(b"HTTP/1.1 ") or data[9:10] == b"1":
        return False
    head = data[:4096].lower()
    return b"\r\ncontent-length:" in head and b"\r\nconnection: close" not in head


def contain_connections() -> None:
    """Make hypercorn's trio workers of this process use ``ContainedConnection``.

    Replaces a name in hypercorn's module, which has no other extension point; the version is pinned.
    """
    setattr(hypercorn.trio.run, TCPServer.__name__, ContainedConnection)

"""A connection that fails, fails alone; one whose client has gone, goes.

hypercorn serves all connections of a worker in one nursery, and some clients can make its protocol code raise:
HTTP/2 frames behind an answer, bytes behind a websocket handshake. The exception would cancel everybody
else's connection with it. And a client that closes its end just as its answer is finished can leave a connection
behind that nobody reads any more, kept for the keep-alive time.
"""

import logging
from typing import Any

import hypercorn.trio.run
from hypercorn.events import Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer

from trio_pool_serve.server.idle_timer import IdleTimer

logger = logging.getLogger(__name__)


JOINED_BELOW = 64 * 1024
"""Bytes of a body that are copied behind the head of their answer, to be sent with it by one system call."""


class ContainedConnection(TCPServer):
    """hypercorn's connection, whose exceptions end nothing but itself, and which ends with its client.

    It also does with one system call and no new task per request what hypercorn does with three and one: the head of
    an answer of known length waits for its body, and the time that a connection is idle is measured by one timer.
    """

    _client_has_gone = False
    _head = b""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.idle_timer = IdleTimer(
            self.config.keep_alive_timeout, self.context.terminated.wait, self._initiate_server_close
        )
        self.idle_task = self.idle_timer  # type: ignore[assignment]  # of the same shape

    async def run(self) -> None:
        """Serve one connection until it is closed. Cancellation: as hypercorn's own."""
        try:
            await super().run()
        except Exception as error:
            # A group, as it comes out of the connection's nursery; a cancellation makes it another type.
            logger.warning("a connection failed: %r", error)
            logger.debug("it failed here", exc_info=error)

    async def protocol_send(self, event: Event) -> None:
        """Act on what the protocol says. Cancellation: as hypercorn's own."""
        if isinstance(event, RawData):
            await self._send(event.data)
            return
        await super().protocol_send(event)
        if isinstance(event, Updated) and self._client_has_gone:
            self.idle_timer.end()

    async def _send(self, data: bytes) -> None:
        if not self._head and _is_head_of_known_length(data):
            self._head = data  # something always follows, if only the news that there is no more
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
        await super()._read_data()
        self._client_has_gone = True
        self.idle_timer.end()


def _is_head_of_known_length(data: bytes) -> bool:
    """Tell a final answer's head, which a body is to follow at once, from all else: a stream's has no length.

    What ends the connection is sent as it comes: hypercorn writes such answers where no body is sure to follow.
    """
    if not data.startswith(b"HTTP/1.1 ") or data[9:10] == b"1":
        return False
    head = data[:4096].lower()
    return b"\r\ncontent-length:" in head and b"\r\nconnection: close" not in head


def contain_connections() -> None:
    """Have hypercorn's trio workers of this process use ``ContainedConnection``.

    By its name in hypercorn's module, for which it has no other seam; the version is pinned.
    """
    setattr(hypercorn.trio.run, TCPServer.__name__, ContainedConnection)

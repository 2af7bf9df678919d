"""A connection that fails, fails alone; one whose client has gone, goes.

hypercorn serves all connections of a worker in one nursery, and some clients can make its protocol code raise:
HTTP/2 frames behind an answer, bytes behind a websocket handshake. The exception would cancel everybody
else's connection with it. And a client that closes its end just as its answer is finished can leave a connection
behind that nobody reads any more, kept for the keep-alive time.
"""

import logging

import hypercorn.trio.run
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer

logger = logging.getLogger(__name__)


class ContainedConnection(TCPServer):
    """hypercorn's connection, whose exceptions end nothing but itself, and which ends with its client."""

    _client_has_gone = False

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
        await super().protocol_send(event)
        if isinstance(event, Updated) and self._client_has_gone:
            await self.idle_task.stop()

    async def _read_data(self) -> None:
        await super()._read_data()
        self._client_has_gone = True
        await self.idle_task.stop()


def contain_connections() -> None:
    """Have hypercorn's trio workers of this process use ``ContainedConnection``.

    By its name in hypercorn's module, for which it has no other seam; the version is pinned.
    """
    setattr(hypercorn.trio.run, TCPServer.__name__, ContainedConnection)

"""A connection that fails, fails alone.

hypercorn serves all connections of a worker in one nursery, and some clients can make its protocol code raise:
HTTP/2 frames behind an answer, bytes behind a websocket handshake. The exception would cancel everybody
else's connection with it.
"""

import logging

import hypercorn.trio.run
from hypercorn.trio.tcp_server import TCPServer

logger = logging.getLogger(__name__)


class ContainedConnection(TCPServer):
    """hypercorn's connection, whose exceptions end nothing but itself."""

    async def run(self) -> None:
        """Serve one connection until it is closed. Cancellation: as hypercorn's own."""
        try:
            await super().run()
        except Exception as error:
            # A group, as it comes out of the connection's nursery; a cancellation makes it another type.
            logger.warning("a connection failed: %r", error)
            logger.debug("it failed here", exc_info=error)


def contain_connections() -> None:
    """Have hypercorn's trio workers of this process use ``ContainedConnection``.

    By its name in hypercorn's module, for which it has no other seam; the version is pinned.
    """
    setattr(hypercorn.trio.run, TCPServer.__name__, ContainedConnection)

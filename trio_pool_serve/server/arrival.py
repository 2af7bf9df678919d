"""When a request arrived, which may be long before a busy event loop gets to read it."""

import contextlib
import select
import socket
from struct import Struct

import trio

LAST_DATA_RECEIVED = Struct("@52xI")
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds."""


def seconds_since_arrival(connection: socket.socket | trio.socket.SocketType) -> float:
    """Return how many seconds ago the last bytes of a connection arrived, whether they have been read or not.

    0 if that is unknown: at Unix sockets, and on other systems than Linux. It takes about a microsecond.
    """
    tcp_info = getattr(socket, "TCP_INFO", None)
    if tcp_info is None:
        return 0.0
    with contextlib.suppress(OSError):  # Unix sockets have none
        received = connection.getsockopt(socket.IPPROTO_TCP, tcp_info, LAST_DATA_RECEIVED.size)
        if len(received) == LAST_DATA_RECEIVED.size:
            milliseconds: int = LAST_DATA_RECEIVED.unpack(received)[0]
            return milliseconds / 1000
    return 0.0


def has_arrived(connection: trio.socket.SocketType) -> bool:
    """Return whether there is something that has not been read."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))

"""The socket of a client: when its last bytes arrived, whether the client still listens, and closing our half."""

import contextlib
import select
import socket
import struct
from collections.abc import Callable

import trio

MAX_RECEIVED = 2**16
"""Maximum bytes of one read, and so of the bytes that can have been read after a running request."""

LINGER_S = 1.0
"""Seconds that a connection closed by the server waits for the client to close it too."""

LINGER_BYTES = 2**20

FIRST_PAUSE_S = 1.0
"""Pause between the first two probes of a half-closed connection; each later pause is twice as long."""

LAST_DATA_RECEIVED = struct.Struct("@52xI")
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds."""


def seconds_since_arrival(connection: socket.socket | trio.socket.SocketType) -> float:
    """Return how many seconds ago the last bytes of a connection arrived, read or unread.

    Return 0 if that is unknown: for Unix sockets, and on systems other than Linux. Takes about a microsecond.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECEIVED.size)
        return float(LAST_DATA_RECEIVED.unpack(info)[0]) / 1000
    except (OSError, AttributeError, struct.error):  # of Unix sockets, and of other systems
        return 0.0


def has_arrived(connection: socket.socket | trio.socket.SocketType, event: int = select.POLLIN) -> bool:
    """Return whether there are unread bytes, or whether another event of ``select.poll`` has occurred."""
    poll = select.poll()
    poll.register(connection.fileno(), event)
    return bool(poll.poll(0))


async def wait_until_gone(connection: trio.socket.SocketType, send_probe: Callable[[], None]) -> None:
    """Wait until a client that has closed its sending half no longer listens.

    A client that closes its connection and one that closes only its sending half send the same: FIN. Nothing
    distinguishes them until something is sent to them (neither TCP_INFO nor a keep-alive probe does, on Linux): the
    kernel of the first answers with RST. So the response is begun early. Its first bytes, ``HTTP/1.1 ``, are the same
    in every response, and a client that listens waits for the rest. ``send_probe`` sends the next of these bytes, if
    any is left: the first at once, the next after one second, two, four, and so on, for clients that close later.

    Without epoll, only readable and writable sockets can be waited for: such a client counts as gone. Cancellation: at
    once.
    """
    if not hasattr(select, "epoll"):
        return
    pause_s = FIRST_PAUSE_S
    with select.epoll() as hang_ups:
        # No events: hang-ups and errors are always reported. The socket itself is readable all the time, at its end.
        hang_ups.register(connection.fileno(), 0)
        while True:
            if connection.family != socket.AF_UNIX:  # there the two differ
                send_probe()
            with trio.move_on_after(pause_s):
                await trio.lowlevel.wait_readable(hang_ups.fileno())
                return
            pause_s *= 2


async def end_sending(connection: trio.socket.SocketType) -> None:
    """Close our sending half, and discard whatever the client still sends for up to ``LINGER_S``.

    Bytes that arrive at a closed connection reset it, before the client may have read the response. Cancellation: at
    once.
    """
    with contextlib.suppress(OSError, trio.ClosedResourceError), trio.move_on_after(LINGER_S):
        connection.shutdown(socket.SHUT_WR)
        left = LINGER_BYTES
        while left > 0 and (data := await connection.recv(MAX_RECEIVED)):
            left -= len(data)

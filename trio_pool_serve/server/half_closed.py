"""Whether a client that has closed its sending half still listens.

A client that closes its connection and one that closes only its sending half send the same: FIN. Nothing tells them
apart until something is sent to them (neither TCP_INFO nor a keep-alive probe does, on Linux): to the first the kernel
answers with RST. So the response is begun early. Its first bytes, ``HTTP/1.1 ``, are those of every response, and a
client that listens waits for the rest. One byte is sent at once, the next after one second, two, four, and so on, for
clients that close later.
"""

import select
import socket
from collections.abc import Callable

import trio

FIRST_PAUSE_S = 1.0


async def wait_until_gone(connection: trio.socket.SocketType, send_probe: Callable[[], None]) -> None:
    """Wait until a client that has closed its sending half listens no more.

    ``send_probe`` sends a byte, or nothing if there is none to be sent. On platforms without epoll, where only readable
    and writable sockets can be waited for, such a client counts as gone. Cancellation: at once.
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

"""systemd: notifications, the watchdog, and sockets that systemd has opened.

The protocol is one datagram per notification and three environment variables (sd_notify(3), sd_listen_fds(3)). The
packages for it are bindings to libsystemd, or no longer maintained.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable

import trio

from trio_pool_serve.telemetry.snapshots import Snapshot

logger = logging.getLogger(__name__)

STOPPING = ("STOPPING=1", "STATUS=draining")

FIRST_FD = 3
"""The number of the first file descriptor that systemd passes."""


def notify(*assignments: str) -> None:
    """Send assignments such as ``READY=1`` or ``STATUS=text`` to systemd, if it asked this process for them."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
            notifications.connect(address)
            notifications.send("\n".join(assignments).encode())
    except OSError as error:
        logger.warning("systemd was not told %s: %s", " ".join(assignments), error)


def take_passed_socket() -> socket.socket | None:
    """Return the listening socket that systemd has passed to this process; ``None`` from the second call on.

    Raises ``OSError`` if systemd has passed several.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.pop("LISTEN_FDS", "0")
    for name in ("LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    if count == "0":
        return None
    if count != "1":
        raise OSError(f"systemd has passed {count} sockets; a server listens on one.")
    os.set_inheritable(FIRST_FD, False)  # noqa: FBT003  (the standard library's own signature)
    return socket.socket(fileno=FIRST_FD)


def is_computing(snapshots: Iterable[Snapshot], batch_timeout_s: float) -> bool:
    """Return whether no batch has been in flight for more than twice the batch timeout.

    ``False`` without snapshots: no process answers. The engine fails such batches itself; this check is for when that
    fails, too.
    """
    models = [model for snapshot in snapshots for model in snapshot.load.get("models", {}).values()]
    return bool(models) and all(model.get("oldest_in_flight_s", 0.0) <= 2 * batch_timeout_s for model in models)


async def feed_watchdog(gather: Callable[[], Awaitable[list[Snapshot]]], batch_timeout_s: float) -> None:
    """Notify systemd's watchdog twice per interval while the event loop turns and forward passes go on.

    ``gather()`` returns the snapshots of the server's processes. Return at once without a watchdog. Cancellation: at
    once.
    """
    period_us, own_pid = os.environ.get("WATCHDOG_USEC", ""), str(os.getpid())
    if not period_us.isdigit() or not int(period_us) or os.environ.get("WATCHDOG_PID", own_pid) != own_pid:
        return
    while True:
        if is_computing(await gather(), batch_timeout_s):
            notify("WATCHDOG=1")
        else:
            logger.warning("the watchdog is not fed: no process computes, or a batch does not end")
        await trio.sleep(int(period_us) / 2e6)

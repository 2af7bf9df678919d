"""The listening socket of a server, and refusals on it. The parent of API workers needs no more than this."""

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.server.systemd import take_passed_socket

BACKLOG = 2048

REFUSAL = b"HTTP/1.1 503 \r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
"""The response to requests that are refused unread."""


def open_listening_socket(network: NetworkConfig) -> socket.socket:
    """Return a bound, listening socket, which outlives the listeners that serve on it.

    Raises ``OSError`` with a message for the user.
    """
    path = network.unix_socket
    family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in network.host else socket.AF_INET
    listening = socket.socket(family)
    try:
        if path is not None:
            _remove_dead_socket(path)
            listening.bind(str(path))
        else:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((network.host, network.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(why_not_listening(error, network)) from error
    listening.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
    return listening


def why_not_listening(error: OSError, network: NetworkConfig) -> str:
    """Return a message for the user: why the server cannot listen, and the flag that helps."""
    if network.unix_socket is not None:
        reason = "in use by another server, or a file" if error.errno == errno.EADDRINUSE else error.strerror
        return f"--host {network.host}: {reason}."
    if isinstance(error, socket.gaierror):
        return f"--host {network.host} is unknown: {error.strerror}."
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {network.port} is in use; try another --port."
        case errno.EACCES | errno.EPERM:
            return f"No permission to listen on port {network.port}; try a --port from 1024 on."
        case errno.EADDRNOTAVAIL:
            return f"--host {network.host} is no address of this machine."
    return f"Cannot listen on {network.host}, port {network.port}: {error.strerror}."


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a killed server. A served socket or any other file stays, so that binding fails."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def url_of(listening: socket.socket, network: NetworkConfig) -> str:
    """Return the URL of a listening socket; ``unix:PATH`` for a Unix socket."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listening.family == socket.AF_INET6 else name[0]
    return f"{'http' if network.ssl_certfile is None else 'https'}://{host}:{name[1]}"


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def send_refusal(connection: socket.socket, *, is_plain: bool) -> None:
    """Send a refusal, as far as the kernel takes it at once; nothing with TLS. The caller closes the connection."""
    connection.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
    with contextlib.suppress(OSError):
        if is_plain:
            connection.send(REFUSAL)
        connection.recv(2**16)  # unread bytes would make closing a reset


def refuse_rest(listening: socket.socket, *, is_plain: bool) -> None:
    """Refuse all connections that were not accepted: closing the listening socket would reset them."""
    with contextlib.suppress(OSError):
        while True:
            with listening.accept()[0] as connection:
                send_refusal(connection, is_plain=is_plain)


@contextlib.contextmanager
def open_listening(network: NetworkConfig) -> Iterator[socket.socket]:
    """Listen for as long as the block lasts; connections that were not accepted by its end are refused.

    A socket passed by systemd is used instead of the settings' address. It stays open at the end, and connections that
    wait on it wait for the next process.
    """
    passed = take_passed_socket()
    with passed or open_listening_socket(network) as listening:
        listening.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
        try:
            yield listening
            if passed is None:
                refuse_rest(listening, is_plain=network.ssl_certfile is None)
        finally:
            if passed is None and network.unix_socket is not None:
                network.unix_socket.unlink(missing_ok=True)

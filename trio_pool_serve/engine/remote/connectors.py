"""Connections of links: by a Unix socket, or by TCP to an engine on a host or one that Ray has placed."""

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import trio
from attrs import define, frozen

from trio_pool_serve.engine.remote.greeting import LinkKeys, greet
from trio_pool_serve.engine.remote.link import LinkRefusedError
from trio_pool_serve.engine.remote.wire import FromEngine
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.socket_folder import is_private

CONNECT_TIMEOUT_S = 2.0
"""Timeout of the TCP connection: a machine that is gone does not refuse it."""

LINK_TIMEOUT_S = 1.5
"""Both ends send three heartbeats in this time: a lost machine is noticed soon, and one late heartbeat ends no link."""

ADDRESS_CHECK_S = 0.1
"""Interval of the checks for the socket of an engine process, or for the file with its address."""

MAX_NAME = 253
"""Maximum characters of a host's name (RFC 1035)."""

LABEL = r"[\w-]{1,63}"

ADDRESS = re.compile(
    rf"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w{{1,15}})?)\]|(?P<host>{LABEL}(?:\.{LABEL})*\.?)):(?P<port>\d{{1,5}})",
    re.ASCII,
)


@frozen
class HostAddress:
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostAddress":
        """Parse ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``."""
        found = ADDRESS.fullmatch(text.strip())
        if found is None or not 0 < int(found["port"]) < 2**16 or len(found["host"] or "") > MAX_NAME:
            raise ValueError(f"{text.strip()[:200]!r} is not HOST:PORT")
        if found["ipv6"]:
            try:
                IPv6Address(found["ipv6"])
            except ValueError as error:
                raise ValueError(f"{text.strip()[:200]!r} is not HOST:PORT: {error}") from error
        return cls(found["ipv6"] or found["host"], int(found["port"]))

    @property
    def is_numeric(self) -> bool:
        """Whether the host is an IP address, not a name to be resolved."""
        with suppress(ValueError):
            return ":" in self.host or bool(IPv4Address(self.host))
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


FAILURES_TO_CONNECT = (OSError, LinkRefusedError, trio.BrokenResourceError)


@define(eq=False)
class Connector:
    """Connects to one engine: opens a stream, and greets the engine if there are ``keys``."""

    name: str
    """The engine's address, for logs."""
    open_stream: Callable[[], Awaitable[trio.SocketStream | None]]
    """Returns ``None`` while there is no engine process, and is called again ``ADDRESS_CHECK_S`` later.

    Raises one of ``FAILURES_TO_CONNECT``. Cancellation: at once; nothing is left open.
    """
    keys: LinkKeys | None = None
    timeout_s: float = math.inf
    """Seconds of silence after which the connection counts as lost; infinite if the kernel reports a lost peer."""
    pauses_s: Sequence[float] = (0.1,)
    """Pauses between failed attempts, in order; the last one repeats."""
    loss: str = "The engine process died; another one is being started."
    """The error message if the connection is lost."""

    async def connect(self) -> FramedStream[FromEngine]:
        """Return a new connection, once there is an engine process. Raises and is cancelled as ``open_stream``."""
        while (stream := await self.open_stream()) is None:  # noqa: ASYNC110  (a file cannot set an event)
            await trio.sleep(ADDRESS_CHECK_S)
        if self.keys is None:
            return FramedStream(stream, FromEngine)
        try:
            return await greet(stream, self.keys.keys, self.timeout_s)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise


def unix_connector(path: Path) -> Connector:
    """Return a connector to an engine process of this machine."""

    async def open_stream() -> trio.SocketStream | None:
        if is_private(path.parent):
            with suppress(ConnectionRefusedError, FileNotFoundError):
                return await trio.open_unix_socket(path)
        return None

    return Connector(path.name, open_stream)


def file_connector(path: Path, keys: LinkKeys) -> Connector:
    """Return a connector to an engine process that Ray has placed, whose address is in a file.

    Each restart changes the address. While there is no file, there is no engine process.
    """

    async def open_stream() -> trio.SocketStream | None:
        with suppress(FileNotFoundError, ValueError):
            return await _open_tcp_stream(HostAddress.parse(path.read_text()))  # noqa: ASYNC240  (in memory)
        return None

    return Connector(path.name, open_stream, keys, LINK_TIMEOUT_S, pauses_s=(0.1, 0.2, 0.5))


def host_connector(address: HostAddress, keys: LinkKeys, timeout_s: float = LINK_TIMEOUT_S) -> Connector:
    """Return a connector to an engine on a host."""
    return Connector(
        str(address),
        lambda: _open_tcp_stream(address),
        keys,
        timeout_s,
        pauses_s=(0.1, 0.2, 0.5, 1.0, 2.0),
        loss=f"The connection to the engine at {address} was lost.",
    )


async def _open_tcp_stream(address: HostAddress) -> trio.SocketStream:
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        return await trio.open_tcp_stream(address.host, address.port)
    raise TimeoutError(f"{address} does not respond")

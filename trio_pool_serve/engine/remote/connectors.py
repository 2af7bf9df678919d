"""How a link connects: to a Unix socket, or to an engine on a host, by TCP."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import trio
from attrs import define, frozen

from trio_pool_serve.engine.remote.greeting import greet
from trio_pool_serve.engine.remote.keys import LinkKeys, LinkRefusedError
from trio_pool_serve.engine.remote.wire import FromEngine
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.socket_folder import is_private

CONNECT_TIMEOUT_S = 2.0
"""For the connection itself: a machine that is gone does not refuse it."""

LINK_TIMEOUT_S = 1.5
"""Both ends send three heartbeats in this time: a lost machine is noticed soon, and one late heartbeat ends no link."""

ADDRESS_CHECK_S = 0.1
"""How often it is looked for the socket of an engine process, or the file with its address."""

MAX_NAME = 253
"""Characters of a host's name (RFC 1035)."""

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
        """Return the address that is written ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``."""
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
        """Whether the host is an IP address, which need not be resolved."""
        with suppress(ValueError):
            return ":" in self.host or bool(IPv4Address(self.host))
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connector(ABC):
    """How one engine is connected to."""

    timeout_s: float
    """Seconds of silence after which the connection counts as lost; infinite where the kernel tells that it is."""
    pauses_s: Sequence[float]
    """Between attempts that fail, in order, then the last one again and again."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The engine's address, for logs."""

    @property
    def loss(self) -> str:
        """What has happened if the connection is lost, as a sentence."""
        return "The engine process has died; another one is being started."

    @abstractmethod
    async def connect(self) -> FramedStream[FromEngine]:
        """Return a new connection.

        Raises one of ``FAILURES_TO_CONNECT``. Cancellation: at once; nothing is left open.
        """


FAILURES_TO_CONNECT = (OSError, LinkRefusedError, trio.BrokenResourceError)


@define(eq=False)
class UnixConnector(Connector):
    """Connects to an engine process of this machine. While there is none, it waits for one."""

    path: Path
    timeout_s = float("inf")
    pauses_s = (0.1,)

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.name

    async def connect(self) -> FramedStream[FromEngine]:  # noqa: D102
        while True:
            if is_private(self.path.parent):
                with suppress(ConnectionRefusedError, FileNotFoundError):
                    return FramedStream(await trio.open_unix_socket(self.path), FromEngine)
            await trio.sleep(ADDRESS_CHECK_S)


@define(eq=False)
class HostConnector(Connector):
    """Connects to an engine by TCP, and greets it with a key."""

    address: HostAddress
    keys: LinkKeys
    timeout_s: float = LINK_TIMEOUT_S
    pauses_s = (0.1, 0.2, 0.5, 1.0, 2.0)

    @property
    def name(self) -> str:  # noqa: D102
        return str(self.address)

    @property
    def loss(self) -> str:  # noqa: D102
        return f"The connection to the engine at {self.name} is lost."

    async def connect(self) -> FramedStream[FromEngine]:  # noqa: D102
        with trio.move_on_after(CONNECT_TIMEOUT_S) as limit:
            stream = await trio.open_tcp_stream(self.address.host, self.address.port)
        if limit.cancelled_caught:
            raise TimeoutError(f"{self.address} does not answer")
        try:
            return await greet(stream, self.keys.keys, self.timeout_s)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise


@define(eq=False)
class FileConnector(Connector):
    """Connects by TCP to an engine process that Ray has placed; its address is in a file, another after each restart.

    While there is no file, there is no engine process: it waits for one.
    """

    path: Path
    keys: LinkKeys
    timeout_s = LINK_TIMEOUT_S
    pauses_s = (0.1, 0.2, 0.5)

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.name

    async def connect(self) -> FramedStream[FromEngine]:  # noqa: D102
        while True:
            with suppress(FileNotFoundError, ValueError):
                address = HostAddress.parse(self.path.read_text())
                break
            await trio.sleep(ADDRESS_CHECK_S)
        return await HostConnector(address, self.keys).connect()

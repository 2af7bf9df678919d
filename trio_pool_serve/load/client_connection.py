"""A keep-alive HTTP/1.1 connection that costs its process little CPU time, and its responses."""

import ssl
from contextlib import suppress
from typing import Self

import httptools
import trio
from attrs import Factory, define, field, frozen

from trio_pool_serve.rendering.media.fetching import open_stream

TIMEOUT, RESET, CUT, NO_CONNECTION, NOT_SENT, NOT_HTTP = (
    "timeout", "reset", "cut off", "no connection", "not sent", "not HTTP",
)  # fmt: skip
"""How a request ends without a status: no whole response in time; the connection reset after it was accepted, or closed
before a whole response; never accepted; never begun, for want of file descriptors or ports in the generator; the
response is not HTTP/1.1."""

CHUNK = 256 * 1024

MAX_HEAD = 64 * 1024
"""Bytes of a response before its body."""

KEPT_BODY = 2**20
"""Bytes of a body that are kept."""

INFORMATIONAL = range(100, 200)


class NoResponseError(Exception):
    """No whole response arrived.

    ``outcome`` is ``RESET``, ``CUT`` or ``NOT_HTTP``. ``is_stale``: the connection had been used before, and nothing
    arrived.
    """

    def __init__(
        self, outcome: str, reason: str = "the connection ended before a whole response", *, is_stale: bool = False
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.is_stale = is_stale


@frozen(kw_only=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    path: str = ""
    """Prefix of every route."""

    @property
    def authority(self) -> str:
        """The value of the header ``Host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@frozen
class Response:
    """The status, and up to ``KEPT_BODY`` bytes of the body."""

    status: int
    body: bytes


@define(eq=False)
class ResponseReader:
    """Reads one response: the callbacks of llhttp."""

    keeps_body: bool
    body: bytearray = field(init=False, factory=bytearray)
    status: int = field(init=False, default=0)
    is_complete: bool = field(init=False, default=False)
    keeps_alive: bool = field(init=False, default=False)
    has_length: bool = field(init=False, default=False)
    """Whether a header tells the end of the body; otherwise the connection ends with it."""
    _head_bytes: int = field(init=False, default=0)
    _parser: httptools.HttpResponseParser = field(
        init=False, default=Factory(httptools.HttpResponseParser, takes_self=True)
    )

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises ``NoResponseError``."""
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise NoResponseError(NOT_HTTP, f"not an HTTP/1.1 response: {data[:100]!r}") from error
        if not self.status and self._head_bytes > MAX_HEAD:
            raise NoResponseError(NOT_HTTP, f"the head of a response exceeds {MAX_HEAD} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002, D102  (httptools')
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.has_length = True

    def on_headers_complete(self) -> None:  # noqa: D102
        self.status = self._parser.get_status_code()
        self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:  # noqa: D102
        if self.keeps_body or self.status != 200:
            self.body += data[: KEPT_BODY - len(self.body)]

    def on_message_complete(self) -> None:  # noqa: D102
        if self.status in INFORMATIONAL:
            self.status, self.has_length = 0, False
        else:
            self.is_complete = True


@define(eq=False)
class ClientConnection(trio.abc.AsyncResource):
    """Sends encoded requests one after the other, and reads their responses.

    With ``keeps_body``, and for other statuses than 200, the body of a response is kept.
    """

    _stream: trio.abc.Stream
    _keeps_body: bool = False
    _used: bool = field(init=False, default=False)
    keeps_alive: bool = field(init=False, default=True)
    """Whether another request can be sent."""

    @classmethod
    async def open(cls, target: Target, *, keeps_body: bool = False) -> Self:
        """Connect. Raises ``OSError`` and ``trio.BrokenResourceError``. Cancellation: at once."""
        return cls(await open_stream(target.host, target.port, target.host, target.tls), keeps_body=keeps_body)

    async def ask(self, request: bytes) -> Response:
        """Send one request and read its response to the end.

        Raises ``NoResponseError``. Cancellation: at once; the connection cannot be used again.
        """
        reader = ResponseReader(self._keeps_body)
        is_stale, self._used = self._used, True  # until something arrives
        self.keeps_alive = False  # until there is a whole response
        with suppress(trio.BrokenResourceError):  # the server may respond before it has read all: read that
            await self._stream.send_all(request)
        while not reader.is_complete:
            try:
                data = bytes(await self._stream.receive_some(CHUNK))
            except trio.BrokenResourceError as error:
                raise NoResponseError(RESET, is_stale=is_stale) from error
            if not data:
                if reader.status and not reader.has_length:
                    return Response(reader.status, bytes(reader.body))
                raise NoResponseError(CUT, is_stale=is_stale)
            is_stale = False
            reader.feed(data)
        self.keeps_alive = reader.keeps_alive
        return Response(reader.status, bytes(reader.body))

    async def aclose(self) -> None:
        """Close the connection. Cancellation: the connection is closed anyway."""
        await trio.aclose_forcefully(self._stream)


def request_bytes(path: str, body: bytes = b"", *, host: str = "localhost", headers: str = "") -> bytes:
    """Return a POST of a JSON ``body``, or a GET without one; ``headers`` are further lines, each with its CRLF."""
    if not body:
        return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body

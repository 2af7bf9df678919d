"""A keep-alive HTTP/1.1 connection that costs its process little, and what came back over it."""

import ssl
from contextlib import suppress
from typing import Self

import httptools
import trio
from attrs import define, field, frozen

from trio_pool_serve.load.outcomes import CUT, RESET

CHUNK = 256 * 1024

MAX_HEAD = 64 * 1024
"""Bytes of a response before its body."""

KEPT_BODY = 2**20
"""Bytes of a body that are kept."""

INFORMATIONAL = range(100, 200)


class ConnectionEndedError(Exception):
    """The connection ended before a whole response.

    ``outcome`` is ``RESET`` or ``CUT``; ``is_stale`` is whether it had been used before, and nothing came.
    """

    def __init__(self, outcome: str, *, is_stale: bool) -> None:
        super().__init__("the connection ended before a whole response")
        self.outcome = outcome
        self.is_stale = is_stale


class NotHttpError(Exception):
    """What came is no response in HTTP/1.1."""


@frozen(kw_only=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    path: str = ""
    """What precedes every route."""

    @property
    def authority(self) -> str:
        """The value of the header ``Host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@frozen
class Response:
    """The status and the body, of which at most ``KEPT_BODY`` bytes are kept, or none."""

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
    """Whether its end is told by a header, and not by the end of the connection."""
    _head_bytes: int = field(init=False, default=0)
    _parser: httptools.HttpResponseParser = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take what has arrived. Raises ``NotHttpError``."""
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise NotHttpError(f"not a response in HTTP/1.1: {data[:100]!r}") from error
        if not self.status and self._head_bytes > MAX_HEAD:
            raise NotHttpError(f"a response whose head has more than {MAX_HEAD} bytes")

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


class ClientConnection(trio.abc.AsyncResource):
    """Sends requests that are already bytes, one after the other, and reads their responses.

    The body of a response is kept with ``keeps_body``, or if the status is not 200.
    """

    def __init__(self, stream: trio.abc.Stream, *, keeps_body: bool = False) -> None:
        self._stream = stream
        self._keeps_body = keeps_body
        self._used = False
        self.keeps_alive = True
        """Whether another request can be sent."""

    @classmethod
    async def open(cls, target: Target, *, keeps_body: bool = False) -> Self:
        """Connect. Raises ``OSError`` and ``trio.BrokenResourceError``. Cancellation: at once."""
        stream = await trio.open_tcp_stream(target.host, target.port)
        if target.tls is None:
            return cls(stream, keeps_body=keeps_body)
        secured = trio.SSLStream(stream, target.tls, server_hostname=target.host, https_compatible=True)
        try:
            await secured.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return cls(secured, keeps_body=keeps_body)

    async def ask(self, request: bytes) -> Response:
        """Send one request and read its response to the end.

        Raises ``ConnectionEndedError`` and ``NotHttpError``. Cancellation: at once; the connection is then of no use.
        """
        reader = ResponseReader(self._keeps_body)
        was_used, self._used = self._used, True
        self.keeps_alive = False  # until there is a whole response
        arrived = False
        with suppress(trio.BrokenResourceError):  # it may be answered before its end: what has arrived is read
            await self._stream.send_all(request)
        while not reader.is_complete:
            try:
                data = bytes(await self._stream.receive_some(CHUNK))
            except trio.BrokenResourceError as error:
                raise ConnectionEndedError(RESET, is_stale=was_used and not arrived) from error
            if not data:
                if reader.status and not reader.has_length:
                    return Response(reader.status, bytes(reader.body))
                raise ConnectionEndedError(CUT, is_stale=was_used and not arrived)
            arrived = True
            reader.feed(data)
        self.keeps_alive = reader.keeps_alive
        return Response(reader.status, bytes(reader.body))

    async def aclose(self) -> None:
        """Close the connection. Cancellation: it is closed all the same."""
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

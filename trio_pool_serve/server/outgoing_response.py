"""The bytes of one HTTP/1.1 response, as h11 would write them."""

import math
import time
from collections.abc import Iterable
from functools import lru_cache

from hypercorn.config import Config
from hypercorn.typing import ResponseSummary
from hypercorn.utils import build_and_validate_headers, suppress_body

from trio_pool_serve.errors import require
from trio_pool_serve.server.incoming_request import IncomingRequest

Headers = list[tuple[bytes, bytes]]

BEGINNING = b"HTTP/1.1 "
"""The first bytes of every response."""

REFUSAL_HEADERS: Headers = [(b"content-length", b"0"), (b"connection", b"close")]


def server_headers(config: Config) -> Headers:
    """Return the headers that the server adds to all responses; their date is formatted once a second."""
    return _headers_at(config, int(time.time()))


@lru_cache(8)  # a process has one server, or a few
def _headers_at(config: Config, _: int) -> Headers:
    return config.response_headers("h11")


class OutgoingResponse:
    """The framing of one response, by the rules of h11.

    Raises ``ValueError`` for headers with a line end in them, and for a body whose length differs from the announced
    one.
    """

    def __init__(self, request: IncomingRequest, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        require(status >= 200, f"{status} is no status of a final response.", ValueError)
        self._headers = build_and_validate_headers(headers)
        self._names = {name.lower(): value for name, value in self._headers}
        self.summary: ResponseSummary = {"status": status, "headers": self._headers}
        self.closes = request.closes
        self._has_body = not suppress_body(request.method, status)
        self._is_chunked = False
        self._framing: Headers = []  # added by us
        self._missing: float = math.inf
        if b"transfer-encoding" in self._names or (b"content-length" not in self._names and status not in {204, 304}):
            self._headers = _without(_without(self._headers, b"content-length"), b"transfer-encoding")
            if request.http_version == "1.1":
                self._framing.append((b"Transfer-Encoding", b"chunked"))
                self._is_chunked = self._has_body
            elif request.method != "HEAD":
                self.closes = True
        elif self._has_body:
            self._missing = int(self._names[b"content-length"])

    @property
    def has_known_length(self) -> bool:
        """Whether the head announces the body's length, or there is no body."""
        return not self._has_body or self._missing < math.inf

    def head(self, server_headers: Headers, *, is_last: bool) -> bytes:
        """Return the head; with ``is_last`` it announces that the server closes the connection."""
        headers = [*self._headers, *server_headers, *([(b"connection", b"close")] if is_last else []), *self._framing]
        if self.closes:
            tokens = {token.strip() for token in self._names.get(b"connection", b"").lower().split(b",")}
            headers = _without(headers, b"connection")
            headers += [(b"Connection", token) for token in sorted((tokens | {b"close"}) - {b"keep-alive", b""})]
        elif is_last or b"close" in self._names.get(b"connection", b"").lower():
            self.closes = True
        return head_bytes(self.summary["status"], headers)

    def body(self, data: bytes, *, is_last: bool) -> bytes:
        """Return the bytes of a piece of the body, and of its end if it is the last."""
        if not self._has_body:
            return b""
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            return chunk + b"0\r\n\r\n" if is_last else chunk
        self._missing -= len(data)
        require(self._missing >= 0, "The body is longer than its head has announced.", ValueError)
        return data

    def check_end(self) -> None:
        """Raise ``ValueError`` if the whole body was shorter than announced."""
        require(self._missing in (0, math.inf), "The body is shorter than its head has announced.", ValueError)


def head_bytes(status: int, headers: Headers) -> bytes:
    """Return the head of a response. Raises ``ValueError`` for headers with a line end in them."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    count = len(headers)
    if lines.count(b"\n") != count or lines.count(b"\r") != count or b"\0" in lines:
        raise ValueError("A header of the response contains a line end.")
    return b"%b%d \r\n%b\r\n" % (BEGINNING, status, lines)


def _without(headers: Headers, name: bytes) -> Headers:
    return [header for header in headers if header[0].lower() != name]

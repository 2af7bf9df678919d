"""Requests of an HTTP/1.x connection, as llhttp reads them."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from attrs import define
from httptools import (
    HttpParserError,
    HttpParserInvalidMethodError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from trio_pool_serve.api.http.request import WAITED_S

END_OF_HEAD = b"\r\n\r\n"

MAX_LENGTH_DIGITS = 20
"""Maximum digits of a length, as in h11: enough for any 64-bit number."""

MAX_HEADERS = 100

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"

FIRST_OF_TOKENS = 0x21
"""The least first byte of a request; TLS and empty lines begin with smaller ones. The same test as in h11."""

MAX_TARGET = 8 * 1024

MAX_REQUEST_LINE = MAX_TARGET + 32
"""Bytes of a request's first line: the target, and any method and version."""

SHORT_PIECE = 32
"""Bytes of a chunked body up to a CR LF CR LF: each takes a call of llhttp, and JSON has next to none."""

MAX_SHORT_PIECES = 1024

CHUNK_OVERHEAD = 32
"""Bytes of framing that each chunk may add: a size, a short extension, two line ends."""


class BadRequestError(Exception):
    """The server does not accept these bytes as a request: it responds with ``status`` and closes the connection."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _require(is_good: bool, otherwise: int = 400) -> None:  # noqa: FBT001  (as an assertion)
    """Raise ``BadRequestError`` with the status ``otherwise`` if a request is not good."""
    if not is_good:
        raise BadRequestError(otherwise)


class LeftToHypercornError(Exception):
    """The request is not read here: the connection, with all of its bytes, is left to hypercorn."""


def asgi_scope(
    http_version: str,
    method: str,
    scheme: str,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    root_path: str,
    client: tuple[str, int] | None,
) -> dict[str, Any]:
    """Return ASGI's scope of a request, without the server's address and state."""
    path, _, query_string = target.partition(b"?")
    return {
        "type": "http",
        "http_version": http_version,
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "method": method,
        "scheme": scheme,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query_string,
        "root_path": root_path,
        "headers": headers,
        "client": client,
        "extensions": {},
    }


class IncomingRequest:
    """The head of a request, and the framing of its body.

    llhttp is strict: no leniency is switched on. It does not report where in its input a request has ended, so it gets
    exactly one head, and a chunked body only up to the next CR LF CR LF, with which such a body ends. Each request has
    a parser of its own: nothing of one request can get into the next.

    Raises ``BadRequestError`` and ``LeftToHypercornError``.
    """

    def __init__(self, head: bytes, max_framing_bytes: int) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self._has_head = False
        self._pieces: list[bytes] = []
        self._framing_left = max_framing_bytes
        self._short_pieces_left = MAX_SHORT_PIECES
        self._parser = HttpRequestParser(self)
        try:
            self._parser.feed_data(head)
        except (HttpParserUpgrade, HttpParserInvalidMethodError, HttpParserInvalidURLError) as error:
            # CONNECT, upgrades, methods that llhttp does not know, and targets without a path: h11 reads these.
            raise LeftToHypercornError from error
        except HttpParserError as error:
            raise BadRequestError(400) from error
        self.method = self._parser.get_method().decode()
        self.http_version = self._parser.get_http_version()
        spaces = head.count(b" ", 0, head.find(b"\r\n"))  # llhttp skips all after the method and the version
        _require(self._has_head and self.http_version in {"1.1", "1.0"} and spaces == 2)
        fields = dict(self.headers)
        self._check(fields)
        self.expects_continue = (
            b"expect" in fields and self.http_version == "1.1" and b"100-continue" in self._tokens(b"expect")
        )
        self.closes = self.http_version == "1.0" or (
            b"connection" in fields and b"close" in self._tokens(b"connection")
        )
        self.is_chunked = b"transfer-encoding" in fields
        if not self.is_chunked:
            del self._parser  # it refers to this request: so both are freed at once
        self._missing = int(fields.get(b"content-length", b"0"))
        self.is_complete = not self.is_chunked and not self._missing

    def _check(self, fields: dict[bytes, bytes]) -> None:
        """Check the rules that llhttp does not check."""
        if b"upgrade" in fields:
            raise LeftToHypercornError
        _require(len(self.headers) <= MAX_HEADERS, otherwise=431)
        if len(fields) < len(self.headers):
            names = [name for name, _ in self.headers]
            _require(all(names.count(name) <= 1 for name in (b"host", b"content-length", b"transfer-encoding")))
        _require((b"host" in fields) if self.http_version == "1.1" else (b"transfer-encoding" not in fields))
        length = fields.get(b"content-length", b"0")
        _require(length.isdigit() and len(length) <= MAX_LENGTH_DIGITS)
        _require(fields.get(b"transfer-encoding", b"chunked").lower() == b"chunked", otherwise=501)

    def scope(self, root_path: str, client: tuple[str, int] | None, waited_s: float) -> dict[str, Any]:
        """Return ASGI's scope, as far as the request, the client's address and the time waited determine it."""
        scope = asgi_scope(self.http_version, self.method, "http", self.target, self.headers, root_path, client)
        scope["extensions"][WAITED_S] = waited_s
        return scope

    def take_body(self, data: bytes) -> tuple[bytes, int]:
        """Return the part of the body in ``data``, and how many bytes of ``data`` that took; set ``is_complete``.

        Raises ``BadRequestError`` for invalid chunks, for chunks with more framing than ``max_framing_bytes``, and for
        more than ``MAX_SHORT_PIECES``.
        """
        if not self.is_chunked:
            taken = min(len(data), self._missing)
            self._missing -= taken
            self.is_complete = not self._missing
            return data if taken == len(data) else data[:taken], taken
        begin = 0
        while begin < len(data) and not self.is_complete:
            end = _end_of_piece(data, begin)
            if end == begin:
                break
            try:
                self._parser.feed_data(data[begin:end])
            except HttpParserError as error:
                raise BadRequestError(400) from error
            if end - begin < SHORT_PIECE and end < len(data):
                self._short_pieces_left -= 1
                _require(self._short_pieces_left >= 0)
            begin = end
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._framing_left -= begin - len(body)
        _require(self._framing_left >= 0)
        return body, begin

    def _tokens(self, name: bytes) -> Iterable[bytes]:
        """Return the members of all headers of that name, in lower case."""
        values = b",".join(value for found, value in self.headers if found == name)
        return [token.strip() for token in values.lower().split(b",")]

    # -- called by llhttp -------------------------------------------------------------------------------------------

    def on_url(self, target: bytes) -> None:
        """Take the request target."""
        _require(not self._has_head)  # else it is another request's, after an end of the body that was not seen
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped, as in hypercorn."""
        if not self._has_head:
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Note that the head has ended."""
        self._has_head = True

    def on_chunk_header(self) -> None:
        """Allow for the framing of one more chunk."""
        self._framing_left += CHUNK_OVERHEAD

    def on_body(self, data: bytes) -> None:
        """Take a piece of a chunked body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Note the end of a chunked body, or of the head of a request without a body."""
        self.is_complete = True


def _end_of_piece(data: bytes, begin: int) -> int:
    """Return where the next CR LF CR LF ends; if there is none, where it may begin, or the end of ``data``."""
    found = data.find(END_OF_HEAD, begin)
    if found >= 0:
        return found + len(END_OF_HEAD)
    return len(data) - next((length for length in (3, 2, 1) if data.endswith(END_OF_HEAD[:length], begin)), 0)


@define(eq=False)
class RequestBuffer:
    """The bytes that have arrived and belong to no request yet.

    Nothing is parsed ahead: bytes after a request stay here unchanged until they are asked for. ``max_head_bytes`` is
    the longest head.
    """

    max_head_bytes: int
    unread: bytes = b""

    def append(self, data: bytes) -> None:
        """Take bytes that have arrived."""
        self.unread = self.unread + data if self.unread else data

    def take_head(self) -> IncomingRequest | None:
        """Return the next request; ``None`` until its whole head has arrived.

        Raises ``BadRequestError`` as early as possible, and ``LeftToHypercornError``, after which ``unread`` begins
        with that request.
        """
        unread = self.unread
        if not unread:
            return None
        end = unread.find(END_OF_HEAD) + len(END_OF_HEAD)
        is_whole = end >= len(END_OF_HEAD)
        _require(unread[0] >= FIRST_OF_TOKENS)
        _require((end if is_whole else len(unread)) <= self.max_head_bytes, otherwise=431)
        _require(len(unread) <= MAX_TARGET or unread.find(b"\n", 0, MAX_REQUEST_LINE) >= 0, otherwise=414)
        if not is_whole:
            # llhttp refuses lines that end without CR: a head with such a line has no end to wait for.
            _require(unread.count(b"\n") == unread.count(b"\r\n"))
            return None
        if unread.startswith(HTTP2_PREFACE):
            raise LeftToHypercornError
        request = IncomingRequest(unread[:end], self.max_head_bytes)
        self.unread = unread[end:]
        return request

    def take_body(self, request: IncomingRequest) -> bytes:
        """Return the part of a request's body that arrived since the last call. Raises ``BadRequestError``."""
        if not self.unread or request.is_complete:
            return b""
        body, taken = request.take_body(self.unread)
        self.unread = self.unread[taken:]
        return body

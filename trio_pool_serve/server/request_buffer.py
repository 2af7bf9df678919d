"""What has arrived on an HTTP/1.x connection, cut into requests."""

from trio_pool_serve.server.incoming_request import END_OF_HEAD, BadRequestError, IncomingRequest, LeftToHypercornError

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"

FIRST_OF_TOKENS = 0x21
"""No request begins with a smaller byte: not TLS, nor an empty line. The same test as h11's."""


MAX_TARGET = 8 * 1024

MAX_REQUEST_LINE = MAX_TARGET + 32
"""Bytes of a request's first line: the target, and as much as any method and version may take."""


class RequestBuffer:
    """The bytes that have arrived and belong to no request yet.

    Nothing is read ahead: what follows a request stays here as it is until it is asked for. ``max_head_bytes`` is the
    longest head.
    """

    def __init__(self, max_head_bytes: int) -> None:
        self._max_head_bytes = max_head_bytes
        self.unread = b""

    def append(self, data: bytes) -> None:
        """Take bytes that have arrived."""
        self.unread = self.unread + data if self.unread else data

    def take_head(self) -> IncomingRequest | None:
        """Return the next request, once all of its head has arrived.

        Raises ``BadRequestError`` as soon as it is known that it is none, and ``LeftToHypercornError``, after which
        ``unread`` begins with that request.
        """
        unread = self.unread
        if not unread:
            return None
        end = unread.find(END_OF_HEAD) + len(END_OF_HEAD)
        if unread[0] < FIRST_OF_TOKENS:
            raise BadRequestError(400)
        if end > self._max_head_bytes or (end < len(END_OF_HEAD) and len(unread) > self._max_head_bytes):
            raise BadRequestError(431)
        if len(unread) > MAX_TARGET and unread.find(b"\n", 0, MAX_REQUEST_LINE) < 0:
            raise BadRequestError(414)
        if end < len(END_OF_HEAD):
            # llhttp refuses a line that ends without CR; a head of such lines has no end to wait for.
            if unread.count(b"\n") != unread.count(b"\r\n"):
                raise BadRequestError(400)
            return None
        if unread.startswith(HTTP2_PREFACE):
            raise LeftToHypercornError
        request = IncomingRequest(unread[:end], self._max_head_bytes)
        self.unread = unread[end:]
        return request

    def take_body(self, request: IncomingRequest) -> bytes:
        """Return what has arrived of a request's body since the last call. Raises ``BadRequestError``."""
        if not self.unread or request.is_complete:
            return b""
        body, taken = request.take_body(self.unread)
        self.unread = self.unread[taken:]
        return body

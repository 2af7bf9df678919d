"""A keep-alive HTTP connection that costs its process almost nothing."""

import re
from types import TracebackType
from typing import Self

import trio

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

CHUNK = 256 * 1024


class UnexpectedAnswerError(Exception):
    """An answer that no benchmark may count: not 200, of unknown length, or cut short."""


class Connection:
    """Sends requests that are already bytes; reads answers that have a Content-Length, and drops them.

    Server and client share two cores, so what the client spends is missing on the other side. Looking
    for two things in an answer's head takes a fraction of what an HTTP library spends on it.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1") -> Self:
        """Connect to ``port`` of a machine, by default this one."""
        return cls(await trio.open_tcp_stream(host, port))

    async def ask(self, request: bytes) -> None:
        """Send one request and read its answer to the end. Raises ``UnexpectedAnswerError``."""
        await self._stream.send_all(request)
        answer = await self._receive()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += await self._receive()
        head = answer[:end]
        length = CONTENT_LENGTH.search(head)
        if head[9:12] != b"200" or length is None:
            raise UnexpectedAnswerError(answer[:1000].decode(errors="replace"))
        missing = end + 4 + int(length[1]) - len(answer)
        while missing > 0:
            missing -= len(await self._receive())

    async def _receive(self) -> bytes:
        received = bytes(await self._stream.receive_some(CHUNK))
        if not received:
            raise UnexpectedAnswerError("the server closed the connection")
        return received

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stream.aclose()


def request_bytes(path: str, body: bytes = b"") -> bytes:
    """Return a POST of a JSON ``body``, or a GET if there is none."""
    if not body:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body

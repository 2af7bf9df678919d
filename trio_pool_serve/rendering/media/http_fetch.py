"""One request to a server that may send anything, and its answer."""

import ssl
from collections.abc import Sequence

import h11
import trio
from attrs import define, field

from trio_pool_serve.errors import MediaError

MAX_HEAD_BYTES = 32 * 1024
"""Of one head, of the trailers of a body, or of the line before a chunk. Sites send a few KiB."""

MAX_HEAD_LINES = 128
"""Of a head, or of trailers, and what is read at once. They are parsed all at once, so this is how long that takes."""

MAX_FRAMING_BYTES = 64 * 1024
PAYLOAD_PER_FRAMING = 32
"""Bytes that are not of a body: interim answers, the head, and the frames of chunks. There may be one more for each 32
of the body. A chunk costs the loop as much as its frame, however little is in it; servers send chunks of kilobytes."""

HEAD_READ_BYTES = 2 * 1024
BODY_READ_BYTES = 8 * 1024
"""At once, so that no more is parsed before somebody else has a turn."""


async def open_stream(address: str, port: int, host: str, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect to an address, by TLS with ``host``'s certificate if there is a context for it.

    Raises ``OSError`` or ``trio.BrokenResourceError`` if there is nobody, or somebody else; ``ValueError`` for a host
    that no certificate can be for. Cancellation: at once; the connection is closed.
    """
    stream = await trio.open_tcp_stream(address, port)
    if ssl_context is None:
        return stream
    try:
        secured = trio.SSLStream(stream, ssl_context, server_hostname=host, https_compatible=True)
        await secured.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secured


@define(eq=False)
class Exchange:
    """Asks once over a ``stream``, which is used for nothing else, and reads what is answered.

    Everybody else has a turn after each interim answer, after the head and after each chunk, however many of them come
    at once; and how many come at all is limited by the bytes that they take.
    """

    stream: trio.abc.Stream
    _protocol: h11.Connection = field(init=False)
    _received: int = field(init=False, default=0)
    _payload: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def ask(self, target: bytes, headers: Sequence[tuple[str, str]]) -> h11.Response:
        """Send a GET and return the head of the answer.

        Raises ``MediaError`` if the connection breaks, or too much comes that is not an answer. Cancellation: at once.
        """
        try:
            request = self._protocol.send(h11.Request(method=b"GET", target=target, headers=list(headers)))
            await self.stream.send_all((request or b"") + (self._protocol.send(h11.EndOfMessage()) or b""))
            while True:
                event = await self._next_event(HEAD_READ_BYTES)
                if isinstance(event, h11.Response):
                    return event
        except (h11.ProtocolError, trio.BrokenResourceError) as error:
            raise _broken() from error

    async def read(self) -> bytes:
        """Return the next bytes of the body, or none at its end. Errors and cancellation: as ``ask``."""
        try:
            event = await self._next_event(BODY_READ_BYTES)
        except (h11.ProtocolError, trio.BrokenResourceError) as error:
            raise _broken() from error
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _next_event(self, read_bytes: int) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._protocol.next_event()
            await trio.lowlevel.checkpoint()
            if isinstance(event, h11.Data):
                self._payload += len(event.data)
            if event is not h11.NEED_DATA:
                return event
            self._check()
            received = await self.stream.receive_some(read_bytes)
            self._received += len(received)
            self._protocol.receive_data(bytes(received))

    def _check(self) -> None:
        """Raise ``h11.RemoteProtocolError`` if so much has come already that no more is asked for."""
        if self._received - self._payload > MAX_FRAMING_BYTES + self._payload // PAYLOAD_PER_FRAMING:
            raise h11.RemoteProtocolError("too much that is not of the body")
        incomplete, _ = self._protocol.trailing_data
        if incomplete.count(b"\n") > MAX_HEAD_LINES:
            raise h11.RemoteProtocolError("too many lines")


def _broken() -> MediaError:
    return MediaError("The connection to the server of an image broke.")

"""One HTTP request to an untrusted server, and its response."""

import ssl
from collections.abc import Sequence

import h11
import trio
from attrs import define, field

from trio_pool_serve.errors import MediaError

MAX_HEAD_BYTES = 32 * 1024
"""Of one head, of the trailers of a body, or of a chunk header. Sites send a few KiB."""

MAX_HEAD_LINES = 128
"""Of a head, or of trailers. They are parsed in one call, whose duration this bounds."""

MAX_FRAMING_BYTES = 64 * 1024
PAYLOAD_PER_FRAMING = 32
"""Bytes other than the body: interim responses, the head, and chunk headers. One more is allowed for each 32 bytes of
the body. Each chunk costs the event loop a fixed time, however small it is; servers send chunks of kilobytes."""

HEAD_READ_BYTES = 2 * 1024
BODY_READ_BYTES = 8 * 1024
"""Per call, which bounds how much is parsed before other tasks run."""


async def open_stream(address: str, port: int, host: str, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect to an address; with ``ssl_context`` by TLS, verifying ``host``'s certificate.

    Raises ``OSError`` or ``trio.BrokenResourceError`` if connecting or the handshake fails; ``ValueError`` for a host
    name that no certificate can have. Cancellation: at once; the connection is closed.
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
    """Sends one request over a ``stream``, which is used for nothing else, and reads the response.

    Other tasks run after each interim response, the head and each chunk, however many arrive together; their number is
    bounded by the bytes that they take.
    """

    stream: trio.abc.Stream
    _protocol: h11.Connection = field(
        init=False, factory=lambda: h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    )
    _received: int = field(init=False, default=0)
    _payload: int = field(init=False, default=0)

    async def send_get(self, target: bytes, headers: Sequence[tuple[str, str]]) -> h11.Response:
        """Send a GET and return the head of the response.

        Raises ``MediaError`` if the connection breaks or too many bytes precede the head. Cancellation: at once.
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
        """Return the next bytes of the body, empty at its end. Errors and cancellation: as ``send_get``."""
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
        """Raise ``h11.RemoteProtocolError`` if the bytes other than the body exceed their limits."""
        if self._received - self._payload > MAX_FRAMING_BYTES + self._payload // PAYLOAD_PER_FRAMING:
            raise h11.RemoteProtocolError("too many bytes other than the body")
        incomplete, _ = self._protocol.trailing_data
        if incomplete.count(b"\n") > MAX_HEAD_LINES:
            raise h11.RemoteProtocolError("too many lines")


def _broken() -> MediaError:
    return MediaError("The connection to the server of an image broke.")

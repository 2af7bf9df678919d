"""HTTP/2 floods: connections that send frames as fast as the server reads them, from a process of their own.

Each kind of frame is prepared as bytes, so that sending costs nothing beside what the server does with it. Connections
that have sent all of their bytes, or are closed by the server, begin anew.

    python -m benchmarks.http2_floods KIND PORT [--connections 16] [--seconds 8] [--address 127.0.3.1] [--with-tls]
"""

import itertools
import ssl
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import cyclopts
import hpack
import trio

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, UNKNOWN = 0, 1, 2, 3, 4, 6, 8, 0x42

END_STREAM, END_HEADERS = 1, 4

COUNT = 1000
"""Frames, or pairs of frames, that a connection prepares."""

PIECE = 2**16

STAY_S = 1.0
"""After all bytes are sent, unless the server closes the connection before."""


def frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def head(method: str = "POST", path: str = "/v1/embeddings", more: int = 0) -> bytes:
    """Return a header block that leaves the peer's table of headers unchanged, with ``more`` headers."""
    fields = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
    fields += [("x-a", "b")] * more
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*each) for each in fields])


def streams(first: int) -> range:
    """Return the numbers of as many streams as there are frames."""
    return range(first, first + 2 * COUNT, 2)


def resets(first: int) -> bytes:
    """Return requests that are cancelled at once (CVE-2023-44487)."""
    block = head()
    return b"".join(
        frame(HEADERS, number, block, END_HEADERS) + frame(RST_STREAM, number, struct.pack(">I", 8))
        for number in streams(first)
    )


def on_open_stream(first: int, payload: bytes) -> bytes:
    """Return a request whose body does not end, and many frames of it."""
    return frame(HEADERS, first, head(), END_HEADERS) + COUNT * frame(DATA, first, payload)


def requests(numbers: Iterable[int], more: int = 0) -> bytes:
    """Return requests that need no key."""
    block = head("GET", "/livez", more)
    return b"".join(frame(HEADERS, number, block, END_HEADERS | END_STREAM) for number in numbers)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "resets": resets,
    "unknown frames": lambda _: COUNT * frame(UNKNOWN, 0, b"x"),
    "SETTINGS": lambda _: COUNT * frame(SETTINGS, 0, struct.pack(">HI", 4, 65_535)),
    "WINDOW_UPDATE": lambda _: COUNT * frame(WINDOW_UPDATE, 0, struct.pack(">I", 1)),
    "PING": lambda _: COUNT * frame(PING, 0, bytes(8)),
    "PRIORITY": lambda first: b"".join(frame(PRIORITY, each, struct.pack(">IB", 0, 15)) for each in streams(first)),
    "empty DATA": lambda first: on_open_stream(first, b""),
    "DATA of a byte": lambda first: on_open_stream(first, b"x"),
    "requests": lambda first: requests(streams(first)),
    "requests with 2,000 headers": lambda first: requests((first, first + 2), 2000),
    "HTTP/1.1 requests": lambda _: COUNT * b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
}
"""What a connection of each kind sends behind the preface and its settings, from the number of a stream on."""


async def connect(port: int, address: str, tls: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect from an address, with TLS if there is a context for it."""
    stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=address)
    return stream if tls is None else trio.SSLStream(stream, tls, https_compatible=True)


async def flood(prepared: bytes, port: int, address: str, tls: ssl.SSLContext | None) -> None:
    """Send prepared bytes over new connections; every second one stays open for a moment. Cancellation: at once."""
    for number in itertools.count():
        with suppress(OSError, trio.BrokenResourceError):
            async with await connect(port, address, tls) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(_discard, stream, nursery.cancel_scope)
                for begin in range(0, len(prepared), PIECE):
                    await stream.send_all(prepared[begin : begin + PIECE])
                nursery.cancel_scope.deadline = trio.current_time() + STAY_S * (number % 2)
        await trio.lowlevel.checkpoint()


async def _discard(stream: trio.abc.Stream, connection: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some(PIECE):
            continue
    connection.cancel(reason="the server has closed the connection")


async def send_flood(kind: str, port: int, connections: int, seconds: float, address: str, *, with_tls: bool) -> None:
    """Send one kind of flood for some seconds. Cancellation: at once."""
    prepared, tls = FLOODS[kind](1), None
    if with_tls:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.set_alpn_protocols(["h2"])
    if not kind.startswith("HTTP/1.1"):
        prepared = PREFACE + frame(SETTINGS) + prepared
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(connections):
                nursery.start_soon(flood, prepared, port, address, tls)


def flood_a_server(
    kind: str,
    port: int,
    /,
    *,
    connections: int = 16,
    seconds: float = 8.0,
    address: str = "127.0.3.1",
    with_tls: bool = False,
) -> None:
    """Send one kind of flood."""
    trio.run(partial(send_flood, kind, port, connections, seconds, address, with_tls=with_tls))


if __name__ == "__main__":
    cyclopts.run(flood_a_server)

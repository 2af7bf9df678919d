"""A server whose bytes a test writes itself."""

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio
from attrs import define, field

from trio_pool_serve.load.client_connection import Target

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@define(eq=False)
class RawServer:
    """Calls ``respond`` for each request; counts connections and requests."""

    respond: "Callable[[RawServer, trio.SocketStream], Awaitable[None]]"
    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(factory=list)

    @property
    def target(self) -> Target:
        return Target(host="127.0.0.1", port=self.port)

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # clients leave at any time
                while request := bytes(await stream.receive_some()):
                    self.requests.append(request)
                    await self.respond(self, stream)


def answering(*parts: bytes) -> Callable[[RawServer, trio.SocketStream], Awaitable[None]]:
    """Respond with these bytes, each part by itself; ``b""`` ends the connection."""

    async def respond(_: RawServer, stream: trio.SocketStream) -> None:
        for part in parts:
            if part:
                await stream.send_all(part)
                await trio.testing.wait_all_tasks_blocked()
            else:
                await stream.aclose()

    return respond


async def reset(_: RawServer, stream: trio.SocketStream) -> None:
    """Reset the connection."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


@asynccontextmanager
async def listening(
    serve: Callable[[trio.abc.Stream], Awaitable[None]], ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve connections to a port of this machine, by TLS with a context, until the block is left; gives the port."""
    listener: trio.abc.Listener
    (listener,) = listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    if ssl_context is not None:
        listener = trio.SSLListener(listener, ssl_context, https_compatible=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel(reason="the test is over")


@asynccontextmanager
async def raw_server(
    respond: Callable[[RawServer, trio.SocketStream], Awaitable[None]], ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[RawServer]:
    server = RawServer(respond)
    async with listening(server.serve, ssl_context) as server.port:
        yield server

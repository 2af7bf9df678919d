"""An app behind the listener of ``trio-pool-serve serve``, in the process of the test."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.server.listener import serve_app
from trio_pool_serve.server.listening_socket import open_listening_socket
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import Connections, ServerContext


async def app(scope, receive, send) -> None:
    """Respond ``ok`` to each request."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served_app(
    app: Any, connections: Connections, settings: Config | None = None, **options: Any
) -> AsyncIterator[socket.socket]:
    """Serve an app until the end of the block; give the socket that listens."""
    with open_listening_socket(NetworkConfig(port=0)) as listening:
        async with served_on(listening, app, connections, settings, **options):
            yield listening


@asynccontextmanager
async def served_on(
    listening: socket.socket,
    app: Any,
    connections: Connections,
    settings: Config | None = None,
    *,
    refusals: RefusalWriter | None = None,
    **options: Any,
) -> AsyncIterator[None]:
    """Serve an app on a listening socket until the end of the block."""
    stop, context = trio.Event(), ServerContext(connections=connections, refusals=refusals)
    if settings is None:
        settings = Config()
        settings.keep_alive_timeout = 75
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_app, app, settings, context, listening, stop, **options))
        yield
        stop.set()


async def connect(listening: socket.socket, address: str = "127.0.0.1", buffer: int | None = None) -> trio.SocketStream:
    """Connect from an address of this machine, with a small receive buffer if given."""
    made = trio.socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await made.bind((address, 0))
    await made.connect(listening.getsockname()[:2])
    return trio.SocketStream(made)

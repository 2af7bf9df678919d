"""A bare ASGI app behind one of several kinds of connection, for `benchmarks.connection_costs`.

python -m benchmarks.connection_kinds --connection ours --port 8001
"""

from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import hypercorn.trio.run
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from hypercorn.trio.tcp_server import TCPServer

from trio_pool_serve.server.contained_connection import ContainedConnection, contain_connections, serve_connection

BODY = b'{"embedding":"' + b"A" * 2048 + b'"}'
"""About as long as an answer with one vector of 384 numbers in base64."""


CONNECTIONS: Mapping[str, Callable[..., Awaitable[None]]] = {
    "hypercorn": TCPServer,
    "hypercorn, contained": ContainedConnection,
    "ours": serve_connection,
}


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the same body, as a bare ASGI app. Cancellation: at once."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def main() -> None:
    """Serve with one of ``CONNECTIONS`` until SIGTERM."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--connection", choices=CONNECTIONS, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    contain_connections()  # for what our connections share with one another
    setattr(hypercorn.trio.run, TCPServer.__name__, CONNECTIONS[arguments.connection])
    config = Config()
    config.bind = [f"127.0.0.1:{arguments.port}"]
    config.keep_alive_max_requests = 1_000_000
    trio.run(serve, answer, config)


if __name__ == "__main__":
    main()

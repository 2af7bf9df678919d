"""A server with nothing to do: its latency while another server is busy shows what the machine allows.

python -m benchmarks.idle --port 8001
"""

from argparse import ArgumentParser
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with two letters, as a bare ASGI app. Cancellation: at once."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def main() -> None:
    """Serve until SIGTERM."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    config = Config()
    config.bind = [f"127.0.0.1:{parser.parse_args().port}"]
    config.keep_alive_max_requests = 1_000_000  # as ours: the default closes busy connections
    trio.run(serve, answer, config)


if __name__ == "__main__":
    main()

"""What our changes to hypercorn's connection save: processor time of the server per request, with and without each.

The same bare ASGI app behind hypercorn's own connection, behind ours, and behind ours without one of its two changes:
the head of an answer that is sent together with its body, and the one timer of idle time per connection. All four
servers stay alive and are loaded in turns; processor time moves little with what else the machine does.

    python -m benchmarks.connection_costs
"""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import cyclopts
import hypercorn.trio.run
import psutil
import trio
from attrs import frozen
from cyclopts import Parameter
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.trio import serve
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import TrioSingleTask

from benchmarks.connection import Connection, request_bytes
from benchmarks.machine import describe_machine
from benchmarks.report import RESULTS, open_steps, print_table, settings_document, write_json
from benchmarks.rounds import Rounds
from benchmarks.servers import Server, open_server
from trio_pool_serve.server.contained_connection import ContainedConnection

BODY = b'{"embedding":"' + b"A" * 2048 + b'"}'
"""About as long as an answer with one vector of 384 numbers in base64."""


class SeparateHead(ContainedConnection):
    """Ours, but the head of an answer is sent by itself."""

    async def _send(self, data: bytes) -> None:
        await TCPServer.protocol_send(self, RawData(data))


class TimerPerRequest(ContainedConnection):
    """Ours, but hypercorn starts a task per request that measures idle time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.idle_task = TrioSingleTask()


CONNECTIONS: Mapping[str, type[TCPServer]] = {
    "hypercorn": TCPServer,
    "ours": ContainedConnection,
    "ours, separate head": SeparateHead,
    "ours, timer per request": TimerPerRequest,
}


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``requests`` of ``clients`` closed-loop clients in each round."""

    rounds: int = 5
    requests: int = 8000
    clients: int = 8
    output_dir: Path = RESULTS


@frozen
class Cost:
    """Processor time of the server process, user and system, per request."""

    processor_us: float


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


def serve_with(name: str, port: int) -> None:
    """Serve with one of ``CONNECTIONS`` until SIGTERM."""
    setattr(hypercorn.trio.run, TCPServer.__name__, CONNECTIONS[name])
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.keep_alive_max_requests = 1_000_000
    trio.run(serve, answer, config)


async def measure(server: Server, settings: Settings) -> Cost:
    """Return the server's cost under load. Cancellation: at once."""
    process = psutil.Process(server.pid)
    request = request_bytes("/", b'{"input":"a text"}')

    async def ask() -> None:
        async with await Connection.open(server.port) as connection:
            for _ in range(settings.requests // settings.clients):
                await connection.ask(request)

    before = process.cpu_times()
    async with trio.open_nursery() as nursery:
        for _ in range(settings.clients):
            nursery.start_soon(ask)
    after = process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    return Cost(1e6 * spent_s / settings.requests)


async def run(settings: Settings) -> None:
    """Measure every kind of connection in every round. Cancellation: at once; the servers are stopped."""
    machine = describe_machine()
    rounds: Rounds[str] = Rounds()
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                open_server(name, ["benchmarks.connection_costs", "--serve", name], ready_path="/")
            )
            for name in CONNECTIONS
        }
        for server in servers.values():
            await measure(server, settings)
        with open_steps("connections", settings.rounds) as step:
            for number in range(settings.rounds):
                step(f"round {number + 1}")
                for name, server in servers.items():
                    rounds.add(name, await measure(server, settings))
    rows = [
        [name, f"{rounds.median(name, 'processor_us'):.0f}", f"{rounds.ratio(name, 'processor_us', 'ours'):.2f}"]
        for name in CONNECTIONS
    ]
    print_table("Processor time of the server per request", ["connection", "µs", "÷ ours"], rows)
    document = {"machine": machine, "settings": settings_document(settings), "connections": rounds.as_document("name")}
    write_json(settings.output_dir, "connection_costs", document)


def measure_all(settings: Settings = Settings()) -> None:
    """Compare kinds of connection by processor time per request."""
    trio.run(run, settings)


def main() -> None:
    """Measure, or be one of the servers."""
    if "--serve" not in sys.argv:
        cyclopts.run(measure_all)
        return
    parser = ArgumentParser()
    parser.add_argument("--serve", choices=CONNECTIONS)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    serve_with(arguments.serve, arguments.port)


if __name__ == "__main__":
    main()

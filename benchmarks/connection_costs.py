"""What reading HTTP/1.1 ourselves saves: processor time of the server per request, by kind of connection.

The same bare ASGI app behind hypercorn's own connection, behind the one of hypercorn's that we contain and use for all
but plain HTTP/1.1, and behind ours, which llhttp parses for. All servers stay alive and are loaded in turns; processor
time moves little with what else the machine does.

    python -m benchmarks.connection_costs
"""

from contextlib import AsyncExitStack
from pathlib import Path

import cyclopts
import psutil
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.connection_kinds import CONNECTIONS
from benchmarks.machine import describe_machine
from benchmarks.report import RESULTS, open_steps, print_table, settings_document, write_json
from benchmarks.rounds import Rounds
from benchmarks.servers import Server, open_server
from trio_pool_serve.load.client_connection import ClientConnection, Target, request_bytes


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


async def measure(server: Server, settings: Settings) -> Cost:
    """Return the server's cost under load. Cancellation: at once."""
    process = psutil.Process(server.pid)
    request = request_bytes("/", b'{"input":"a text"}')

    async def ask() -> None:
        async with await ClientConnection.open(Target(host="127.0.0.1", port=server.port)) as connection:
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
                open_server(name, ["benchmarks.connection_kinds", "--connection", name], ready_path="/")
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


def main(settings: Settings = Settings()) -> None:
    """Compare kinds of connection by processor time per request."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

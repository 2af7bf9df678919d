"""What does it cost to refuse a request? The server's CPU time per refusal, and what each point of refusing buys.

One request of many long texts fills the queue, and all others are refused with 429: waves of requests over new
connections, which the server or the client closes, and over kept ones. All ``checkouts`` are measured in turns, the
last one also ``without`` each point.

    python -m benchmarks.refusal_costs
    python -m benchmarks.refusal_costs --checkouts ../before . --without
"""

import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.full_server import POINTS
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.report import RESULTS, Names, Report, command_of, open_steps, print_table
from benchmarks.rounds import Rounds
from benchmarks.servers import ROOT, Server, free_port, open_process, wait_for_ok
from trio_pool_serve.load.client_connection import request_bytes

Kind: TypeAlias = Literal["new, server closes", "new, client closes", "kept", "kept, head first", "kept, large"]

CLIENTS = 16
"""Connections of a wave: all requests are sent before a response is read."""

FILLING_TEXTS = 2000
"""Of 200 words: minutes of work for the runner."""

FILLED_S = 15.0
"""Seconds until the runner's rate is known."""

LARGE_TEXTS = 512
"""Of 34 tokens: a body that is decoded in a thread."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``requests`` of each kind in each round, to each server.

    Of several ``models`` one has a full queue, and is named.
    """

    rounds: int = 25
    requests: int = 160
    checkouts: Names = (str(ROOT),)
    models: int = 1
    without: Names = tuple(POINTS)
    output_dir: Path = RESULTS


@frozen
class Cost:
    """The server's CPU time per request, and the requests that got a 503, unread, instead of a 429."""

    cpu_us: float
    unread: int


def cpu_s(server: Server) -> float:
    """Return the CPU time of the server's threads so far."""
    return time.clock_gettime(~server.pid << 3 | 2)  # as clock_getcpuclockid of Linux


def requests_of(kind: Kind, texts: list[str]) -> tuple[bytes, ...]:
    """Return the bytes of one request, in pieces that arrive separately."""
    body = {"model": MODEL_NAME, "input": texts if kind == "kept, large" else texts[0]}
    request = request_bytes("/v1/embeddings", json.dumps(body).encode())
    head, separator, content = request.partition(b"\r\n\r\n")
    if kind == "new, server closes":
        head += b"\r\nConnection: close"
    return (head + separator, content) if kind == "kept, head first" else (head + separator + content,)


def ask(port: int, kind: Kind, pieces: tuple[bytes, ...], requests: int) -> int:
    """Send requests in waves and read all responses; return how many were 503. Raises ``ValueError`` for an answer."""
    unread = 0
    with ExitStack() as kept:
        connections = [] if kind.startswith("new") else [*_connect(port, kept)]
        for connection in connections:
            connection.sendall(request_bytes("/health"))
            _status(connection)
        for _ in range(requests // CLIENTS):
            with ExitStack() as opened:
                wave = connections or [*_connect(port, opened)]
                for piece in pieces:
                    for connection in wave:
                        connection.sendall(piece)
                for connection in wave:
                    if (status := _status(connection)) not in (b"429", b"503"):
                        raise ValueError(f"status {status.decode()} where 429 was expected")
                    unread += status == b"503"
    return unread


def _connect(port: int, opened: ExitStack) -> Iterator[socket.socket]:
    for _ in range(CLIENTS):
        connection = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def _status(connection: socket.socket) -> bytes:
    """Return the status of the response, which is read to its end. Raises ``EOFError`` if there is none."""
    with connection.makefile("rb") as response:
        status, length = response.readline()[9:12], 0
        while line := response.readline().strip():
            name, _, value = line.lower().partition(b": ")
            length = int(value) if name == b"content-length" else length
        if not status or len(response.read(length)) < length:
            raise EOFError("a connection was closed without a response")
    return status


@asynccontextmanager
async def full_server(checkout: str, without: str, models: int) -> AsyncIterator[Server]:
    """Run a server whose queue is full."""
    # Equal texts would be computed once.
    filling = json.dumps({"input": [f"{number}" + " word" * 200 for number in range(FILLING_TEXTS)]}).encode()
    port = free_port()
    program = Path(checkout) / "benchmarks" / "full_server.py"
    command = [sys.executable, str(program), *([f"-{without}"] if without else [])]
    # With the least of bounds any request is refused while another waits.
    command += [f"{name}={MODEL_PATH}" for name in (MODEL_NAME, *map(str, range(1, models)))]
    command += ["--port", str(port), "--max-queue-s", "0.001", "--request-timeout-s", "3600"]
    os.environ["PYTHONPATH"] = checkout
    async with open_process("ours", command, port) as server:
        await wait_for_ok(server.url + "/readyz")
        with socket.create_connection(("127.0.0.1", port)) as filler:
            await trio.to_thread.run_sync(filler.sendall, request_bytes("/v1/embeddings", filling))
            yield server


async def measure(server: Server, kind: Kind, texts: list[str], requests: int) -> Cost:
    """Return what requests of a kind cost. Cancellation: after the responses."""
    pieces, before = requests_of(kind, texts), cpu_s(server)
    unread = await trio.to_thread.run_sync(ask, server.port, kind, pieces, requests)
    return Cost(1e6 * (cpu_s(server) - before) / requests, unread)


async def run(settings: Settings) -> None:
    """Measure in rounds, and write the results. Cancellation: at once; the servers are stopped."""
    report = Report("refusal_costs", settings)
    texts = Texts().make(LARGE_TEXTS, 34)
    wanted = {checkout: (checkout, "", settings.models) for checkout in settings.checkouts}
    wanted |= {f"without {point}": (settings.checkouts[-1], point, settings.models) for point in settings.without}
    rounds: Rounds[tuple[str, Kind]] = Rounds()
    async with AsyncExitStack() as opened:
        servers = {name: await opened.enter_async_context(full_server(*which)) for name, which in wanted.items()}
        await trio.sleep(FILLED_S)  # until the rate is known: this is a measurement, not a test
        with open_steps("refusals", settings.rounds) as step:
            for number in range(settings.rounds):
                step(f"round {number + 1}")
                for kind in get_args(Kind):
                    for name, server in servers.items():
                        rounds.add((name, kind), await measure(server, kind, texts, settings.requests))
    show(list(wanted), rounds)
    report.write(costs=rounds.as_document("server", "kind"))


def show(servers: Sequence[str], rounds: Rounds[tuple[str, Kind]]) -> None:
    """Print the table."""
    rows = []
    for name in servers:
        costs = [f"{rounds.median((name, kind), 'cpu_us'):.0f}" for kind in get_args(Kind)]
        ratios = [f"{rounds.ratio((name, kind), 'cpu_us', (servers[0], kind)):.2f}" for kind in get_args(Kind)]
        least = [f"{min(cost.cpu_us for cost in rounds.results[name, kind]):.0f}" for kind in get_args(Kind)]
        rows.append([name, *map("{} ({}, ≥ {})".format, costs, ratios, least)])
    title = f"The server's CPU time per refused request, µs (÷ {servers[0]}, the least), {MODEL_NAME}"
    print_table(title, ["server", *get_args(Kind)], rows)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

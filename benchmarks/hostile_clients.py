"""How do clients harm a server that do not read, send texts of ten megabytes, or flood it? Memory, and others' time.

Four attacks from one address, each beside polite clients of others, who send a text each on a timetable:

- unread: HTTP/2 with a window of 0; on each connection several requests whose responses have megabytes. The server's
  memory is read before, at its peak, and after the clients have left. In several rounds, memory that is not freed
  adds up.
- slow readers: over HTTP/1.1, they read a response at a few kilobytes a second.
- long texts: dozens of texts of ten megabytes, to be truncated; polite texts have 2.6 KB.
- floods: 1, 4 and 16 connections that send HTTP/2 frames of one kind as fast as they are read, and begin anew
  (``http2_floods``); pipelined HTTP/1.1 requests for comparison.

    python -m benchmarks.hostile_clients
"""

import json
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import cyclopts
import h2.config
import h2.connection
import h2.settings
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.http2_floods import FLOODS
from benchmarks.model import MODEL_NAME, Texts
from benchmarks.open_loop import UNANSWERED, OpenLoopJob, OpenLoopResult, counts, run_open_loop
from benchmarks.overload_results import REFUSED
from benchmarks.report import (
    RESULTS,
    Flags,
    Names,
    Numbers,
    Report,
    command_of,
    open_figure,
    open_steps,
    print_table,
    write_figure,
)
from benchmarks.server_state import resident_mib, wait_idle, watch_memory
from benchmarks.servers import Server, open_ours, open_process
from trio_pool_serve.load.client_connection import request_bytes

ATTACKER, POLITE = "127.0.3.1", "127.0.3.2"

MANY_TEXTS = json.dumps({"model": MODEL_NAME, "input": ["a"] * 2048}).encode()
"""A body of 10 KB whose response has ten megabytes."""

CLOSE = "Connection: close\r\n"

POLITE_TOKENS, MEDIUM_TOKENS = 34, 330
"""A text of the latter has 2.6 KB."""

SAMPLE_S = 0.1

REFUSED_PAUSE_S = 10.0
"""Before a slow reader that was refused tries again, on average."""

BEGIN_S = 5.0
"""Duration of an attack before the polite clients begin."""

SETTLE_S = 16.0
"""After the attackers have left. Then a request is computed, with which freed memory is returned at most every 15 s."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``rounds`` of ``seconds``, with ``per_s`` polite requests a second; ``only`` these attacks.

    ``memory_mib`` is the server's budget for what requests hold.
    """

    only: Names = ()
    rounds: int = 3
    seconds: float = 20.0
    slow_seconds: float = 120.0
    per_s: float = 10.0
    memory_mib: int = 256
    connections: int = 20
    streams: int = 6
    slow_readers: int = 100
    slow_kib_per_s: float = 12.0
    long_texts: int = 40
    long_mb: float = 10.0
    flood_connections: Numbers = (1, 4, 16)
    flood_seconds: float = 10.0
    flags: Flags = ()
    output_dir: Path = RESULTS


@define
class Round:
    """The server's resident MiB at times, and what the polite clients got alone and beside the attack."""

    attack: str
    before_mib: float
    alone: OpenLoopResult
    beside: OpenLoopResult
    samples: list[tuple[float, float]] = field(factory=list)
    after_mib: float = 0.0

    @property
    def peak_mib(self) -> float:
        """The most memory that the server had."""
        return max((mib for _, mib in self.samples), default=self.before_mib)


async def connect(server: Server, *, buffer: int = 4096) -> trio.SocketStream:
    """Connect from the attacker's address, with a small buffer."""
    connection = trio.socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await connection.bind((ATTACKER, 0))
    await connection.connect(("127.0.0.1", server.port))
    return trio.SocketStream(connection)


async def read_nothing(server: Server, settings: Settings) -> None:
    """Hold HTTP/2 streams with a window of 0, and open new ones as they end. Cancellation: at once."""
    while True:
        with suppress(trio.BrokenResourceError):
            async with await connect(server) as stream:
                client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
                client.initiate_connection()
                client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
                head = [(":method", "POST"), (":path", "/v1/embeddings"), (":authority", "x"), (":scheme", "http")]
                for _ in range(settings.streams):
                    number = client.get_next_available_stream_id()
                    client.send_headers(number, [*head, ("content-type", "application/json")])
                    client.send_data(number, MANY_TEXTS, end_stream=True)
                await stream.send_all(client.data_to_send())
                while await stream.receive_some():
                    pass
        await trio.sleep(SAMPLE_S)


async def paced(stream: trio.SocketStream, piece: int) -> AsyncIterator[bytes]:
    """Receive pieces on a timetable until the server closes the connection. Cancellation: at once."""
    while data := await stream.receive_some(piece):
        yield data
        await trio.sleep(SAMPLE_S)


async def read_slowly(server: Server, settings: Settings) -> None:
    """Read responses slowly, one after the other. Cancellation: at once."""
    piece = round(settings.slow_kib_per_s * 1024 * SAMPLE_S)
    while True:
        with suppress(trio.BrokenResourceError):
            async with await connect(server, buffer=2 * piece) as stream:
                await stream.send_all(request_bytes("/v1/embeddings", MANY_TEXTS, headers=CLOSE))
                async for _ in paced(stream, piece):
                    pass
        await trio.sleep(REFUSED_PAUSE_S * random.uniform(0.5, 1.5))


async def send_long_texts(server: Server, settings: Settings) -> None:
    """Send a text of megabytes again and again. Cancellation: at once."""
    text = "structured concurrency " * round(settings.long_mb * 1e6 / 23)
    body = json.dumps({"model": MODEL_NAME, "input": text, "truncate_prompt_tokens": -1}).encode()
    while True:
        with suppress(trio.BrokenResourceError):
            async with await connect(server, buffer=2**17) as stream:
                await stream.send_all(request_bytes("/v1/embeddings", body, headers=CLOSE))
                while await stream.receive_some():
                    pass
        await trio.sleep(SAMPLE_S)


Attack = Callable[[Server, Settings], Awaitable[None]]


@asynccontextmanager
async def attacking(attack: Attack, clients: int, server: Server, settings: Settings) -> AsyncIterator[None]:
    """Run ``clients`` attackers in the block."""
    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(attack, server, settings)
        yield
        nursery.cancel_scope.cancel(reason="the attack is over")


async def measure(name: str, attack: Attack, clients: int, server: Server, settings: Settings) -> Round:
    """Measure one round of an attack. Cancellation: at once."""
    seconds = settings.slow_seconds if attack is read_slowly else settings.seconds
    per_s = settings.per_s / 10 if attack is send_long_texts else settings.per_s
    count = round(per_s * seconds)

    def job(texts: Sequence[str]) -> OpenLoopJob:  # a text each: what was computed before is in the cache of results
        fields = {"model": MODEL_NAME, "truncate_prompt_tokens": -1, "encoding_format": "base64"}
        bodies = [json.dumps({**fields, "input": text}) for text in texts]
        return OpenLoopJob(
            port=server.port, bodies=bodies, per_s=per_s, seconds=seconds, sources=[POLITE], timeout_s=60
        )

    polite = Texts().make(2 * count, MEDIUM_TOKENS if attack is send_long_texts else POLITE_TOKENS)
    await wait_idle(server)
    before_mib, alone = resident_mib(server), await run_open_loop(job(polite[:count]))
    async with watch_memory(server, every_s=SAMPLE_S) as samples, attacking(attack, clients, server, settings):
        await trio.sleep(BEGIN_S)
        beside = await run_open_loop(job(polite[count:]))
    await wait_idle(server)
    await trio.sleep(SETTLE_S)
    await run_open_loop(attrs.evolve(job(polite[:1]), seconds=1.0))
    return Round(name, before_mib, alone, beside, samples, resident_mib(server))


@asynccontextmanager
async def flooding(kind: str, connections: int, server: Server) -> AsyncIterator[None]:
    """Flood a server in the block, from a process of its own."""
    program = [sys.executable, "-m", "benchmarks.http2_floods", kind, str(server.port)]
    command = [*program, "--connections", str(connections), "--seconds", "600", "--address", ATTACKER]
    async with open_process("flood", command, 0):
        yield


async def measure_flood(kind: str, connections: int, server: Server, settings: Settings) -> Round:
    """Measure one flood, without waiting for memory to be returned. Cancellation: at once."""
    texts = Texts().make(2 * round(settings.per_s * settings.flood_seconds), POLITE_TOKENS)
    bodies = [json.dumps({"model": MODEL_NAME, "input": text, "encoding_format": "base64"}) for text in texts]
    job = OpenLoopJob(port=server.port, per_s=settings.per_s, seconds=settings.flood_seconds, sources=[POLITE])
    half = len(bodies) // 2
    await wait_idle(server)
    before_mib, alone = resident_mib(server), await run_open_loop(attrs.evolve(job, bodies=bodies[:half]))
    async with watch_memory(server, every_s=SAMPLE_S) as samples, flooding(kind, connections, server):
        await trio.sleep(1.0)
        beside = await run_open_loop(attrs.evolve(job, bodies=bodies[half:]))
    await wait_idle(server)
    return Round(f"{kind} × {connections}", before_mib, alone, beside, samples, resident_mib(server))


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; the server is stopped."""
    report = Report(name_of(settings), settings)
    known: list[tuple[str, Attack, int, int]] = [
        ("unread", read_nothing, settings.connections, settings.rounds),
        ("slow readers", read_slowly, settings.slow_readers, 1),
        ("long texts", send_long_texts, settings.long_texts, 1),
    ]
    attacks = [each for each in known if each[0] in (settings.only or (each[0],))]
    flags = ["--memory-budget-bytes", str(settings.memory_mib * 2**20), "--result-cache-bytes", str(2**26)]
    measured: list[Round] = []
    floods = [(kind, count) for kind in FLOODS for count in settings.flood_connections]
    floods = floods if "floods" in (settings.only or ("floods",)) else []
    async with open_ours(*flags, *settings.flags) as server:
        with open_steps("hostile clients", sum(rounds for *_, rounds in attacks) + len(floods)) as step:
            for name, attack, clients, rounds in attacks:
                for number in range(rounds):
                    step(f"{name} {number + 1}")
                    measured.append(await measure(name, attack, clients, server, settings))
            for kind, count in floods:
                step(f"{kind} × {count}")
                measured.append(await measure_flood(kind, count, server, settings))
    show(measured)
    report.write(rounds=[*map(as_document, measured)])
    draw(measured, settings)


def name_of(settings: Settings) -> str:
    """Return the name of the files with the results; a part of the attacks has its own."""
    return "_".join(["hostile_clients", *settings.only]).replace(" ", "_")


def show(measured: Sequence[Round]) -> None:
    """Print the tables."""
    memory = [
        [each.attack, f"{each.before_mib:.0f}", f"{each.peak_mib:.0f}", f"{each.after_mib:.0f}"] for each in measured
    ]
    print_table("Resident memory, MiB", ("attack", "before", "peak", "after they left"), memory)
    rows = [
        [f"{each.attack}: {what}", *_numbers(getattr(each, what))] for each in measured for what in ("alone", "beside")
    ]
    print_table("What polite clients got", ("attack", "200/s", "p50 ms", "p99 ms", "refused", "unanswered"), rows)


def _numbers(result: OpenLoopResult) -> list[str]:
    latencies = [f"{result.latency_ms(share, '200'):.1f}" for share in (0.5, 0.99)]
    return [f"{result.goodput:.1f}", *latencies, str(result.count(*REFUSED)), str(result.count(*UNANSWERED))]


def as_document(each: Round) -> dict[str, Any]:
    """Return a round for JSON."""
    document = attrs.asdict(each, filter=lambda attribute, _: attribute.name not in ("alone", "beside"))
    document["peak_mib"] = each.peak_mib
    for name, result in (("alone", each.alone), ("beside", each.beside)):
        quantiles = {f"p{share}_ms": result.latency_ms(share / 100, "200") for share in (50, 99)}
        document[name] = {"outcomes": counts(result), **quantiles}
    return document


def draw(measured: Sequence[Round], settings: Settings) -> None:
    """Plot memory over time, and the polite clients' p99."""
    figure, (memory, latency) = open_figure(2)
    for number, each in enumerate(measured, 1):
        label = None if "×" in each.attack else f"{number}: {each.attack}"  # of floods there are too many
        memory.plot(*zip(*each.samples, strict=True), label=label)
    memory.set(title="Resident memory of the server, MiB", xlabel="seconds", ylim=0)
    if memory.get_legend_handles_labels()[1]:
        memory.legend(frameon=False)
    places = range(len(measured))
    for offset, what in enumerate(("alone", "beside")):
        latencies = [getattr(each, what).latency_ms(0.99, "200") for each in measured]
        drawn = latency.barh([place + 0.4 * offset for place in places], latencies, 0.38, label=what)
        latency.bar_label(drawn, fmt="%.0f", fontsize="x-small")
    latency.set_yticks([place + 0.2 for place in places], [each.attack for each in measured], fontsize="x-small")
    latency.invert_yaxis()
    latency.set(title="p99 of polite clients, ms", xscale="log")
    latency.legend(frameon=False)
    write_figure(figure, settings.output_dir, name_of(settings))


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

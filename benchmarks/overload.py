"""What does a server do with more requests than it can compute? Goodput, refusals and memory at 1× to 10× its capacity.

Capacity is the best goodput of closed-loop clients that open a connection for each request. Then requests arrive on a
timetable, at multiples of it, whether or not earlier ones were answered: over a new connection each, whose client gives
up after ``timeout_s``. Every request is accounted for, and ``/health`` is requested ten times a second meanwhile.

    python -m benchmarks.overload
    python -m benchmarks.overload --only texts --factors 5 --seconds 10
"""

import json
import math
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import attrs
import cyclopts
import pybase64
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.load import LoadJob, run_load
from benchmarks.machine import describe_machine
from benchmarks.made_models import IMAGES, make_models
from benchmarks.model import MODEL_NAME, Texts
from benchmarks.open_loop import (
    NOT_SENT,
    UNANSWERED,
    OpenLoopJob,
    OpenLoopResult,
    counts,
    merged,
    run_job,
    run_jobs,
)
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
from benchmarks.scenarios import jpeg
from benchmarks.server_state import resident_mib, wait_idle
from benchmarks.servers import Server, open_ours

TOKENS = 34

TEXTS_PER_BATCH = 64

PICTURE = (256, 256)

KEEP_ALIVE_CLIENTS = 64

HEALTH_PER_S = 10.0

REFUSED = ("429", "503")

MAX_QUEUE_S = 5.0
"""The server's default."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` of load at each of the ``factors`` of the capacity, of ``only`` these kinds of request.

    ``generators`` processes send it, each from addresses of its own. In each round every server is started once.
    """

    rounds: int = 1
    seconds: float = 60.0
    capacity_seconds: float = 10.0
    clients: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (16, 64)
    factors: Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative=())] = (1.0, 2.0, 5.0, 10.0)
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = ()
    flags: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=(), allow_leading_hyphen=True)] = ()
    generators: int = 2
    timeout_s: float = 20.0
    poisson: bool = False
    output_dir: Path = RESULTS

    def __attrs_post_init__(self) -> None:
        if unknown := set(self.only) - set(KINDS):
            raise ValueError(f"there are no requests {', '.join(sorted(unknown))}")


@frozen
class Kind:
    """Requests of one kind, and the flags of the server that gets them."""

    name: str
    bodies: list[str]
    flags: tuple[str, ...] = ()


def texts(_: Path) -> Kind:
    """Return requests of a text each."""
    return Kind("texts", [_body(MODEL_NAME, input=text) for text in Texts().make(512, TOKENS)])


def texts_to_several_processes(folder: Path) -> Kind:
    """Return the same, for a server of several processes."""
    flags = ("--api-workers", "4", "--engine", "process")
    return attrs.evolve(texts(folder), name="processes", flags=flags)


def batches(_: Path) -> Kind:
    """Return requests of many texts each."""
    made = Texts()
    return Kind("batches", [_body(MODEL_NAME, input=made.make(TEXTS_PER_BATCH, TOKENS)) for _ in range(32)])


def images(folder: Path) -> Kind:
    """Return requests of an image each, none of them in the cache."""
    urls = [f"data:image/jpeg;base64,{pybase64.b64encode(jpeg(seed, PICTURE)).decode()}" for seed in range(64)]
    bodies = [_body(IMAGES, input=[url], modality="image") for url in urls]
    return Kind("images", bodies, (f"{IMAGES}={make_models(folder)[IMAGES]}", "--media-cache-bytes", "0"))


KINDS: dict[str, Callable[[Path], Kind]] = {
    "texts": texts,
    "processes": texts_to_several_processes,
    "batches": batches,
    "images": images,
}
"""What is sent, by the names that ``--only`` takes; a folder for models is the argument."""


def _body(model: str, **fields: Any) -> str:
    return json.dumps({"model": model, "encoding_format": "base64", **fields})


@frozen
class Capacity:
    """Requests/s of closed-loop clients: each over a connection of its own, by number of clients, and kept alive."""

    by_clients: dict[int, float]
    kept_alive: float | None

    @property
    def goodput(self) -> float:
        """The best of those with a connection per request."""
        return max(self.by_clients.values())


@define
class Phase:
    """One load of one server."""

    factor: float
    load: OpenLoopResult
    health: OpenLoopResult
    before_mib: float
    peak_mib: float
    after_mib: float
    settled: bool

    def ends(self) -> list[str]:
        """Return how the requests ended: one row of a table."""
        load = self.load
        other = sum(counts(load).values()) - load.count("200", *REFUSED, *UNANSWERED, NOT_SENT)
        ends = [load.count("200"), *map(load.count, REFUSED), other, *map(load.count, UNANSWERED)]
        return [f"{load.wanted / load.seconds:.0f}", f"{load.offered / load.seconds:.0f}", *map(str, ends)]

    def quality(self, capacity: Capacity) -> list[str]:
        """Return what the requests got, as a row."""
        load, health = self.load, self.health
        return [
            f"{load.goodput / capacity.goodput:.2f}",
            *(_ms(load.latency_ms(share, "200")) for share in (0.5, 0.99)),
            _ms(load.latency_ms(0.99, *REFUSED)),
            str(load.without_retry_after),
            _ms(health.latency_ms(0.99, "200")),
            str(health.count(*UNANSWERED)),
        ]

    def costs(self) -> list[str]:
        """Return the server's memory and what the generators did, as a row."""
        return [
            f"{self.before_mib:.0f}",
            f"{self.peak_mib:.0f}",
            f"{self.after_mib:.0f}",
            "yes" if self.settled else "**no**",
            _ms(self.load.late_ms),
            str(self.load.count(NOT_SENT)),
            f"{self.load.cpu_s / self.load.seconds:.2f}",
        ]


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}"


ENDS = ("load", "wanted/s", "offered/s", "200", *REFUSED, "other", *UNANSWERED)

QUALITY = (
    *("load", "goodput ÷ capacity", "p50 ms", "p99 ms", "refusals p99 ms", "refusals without Retry-After"),
    *("/health p99 ms", "/health unanswered"),
)

COSTS = ("load", "MiB before", "peak", "after", "settled", "sent late, p99 ms", "not sent", "generator cores")


@define
class Overload:
    """One kind of requests: the capacity, and the loads."""

    kind: str
    capacity: Capacity
    phases: list[Phase] = field(factory=list)


async def measure_capacity(server: Server, kind: Kind, settings: Settings) -> Capacity:
    """Return what the server answers to closed-loop clients. Cancellation: at once."""
    seconds = settings.capacity_seconds
    by_clients = {}
    for clients in (settings.clients[0], *settings.clients):  # the first one warms up
        job = OpenLoopJob(port=server.port, bodies=kind.bodies, clients=clients, seconds=seconds)
        by_clients[clients] = (await run_job(job)).goodput
    kept = LoadJob(port=server.port, bodies=kind.bodies, clients=KEEP_ALIVE_CLIENTS, seconds=seconds)
    with suppress(subprocess.CalledProcessError):  # refused: the load generator takes nothing but 200
        return Capacity(by_clients, (await run_load(kept)).requests_per_s)
    return Capacity(by_clients, None)


def jobs_of(server: Server, kind: Kind, per_s: float, settings: Settings) -> list[OpenLoopJob]:
    """Return the jobs of the generators, each from sixteen addresses: one has ports for 28,000 connections."""
    share = per_s / settings.generators
    return [
        OpenLoopJob(
            port=server.port,
            bodies=kind.bodies,
            per_s=share,
            seconds=settings.seconds,
            timeout_s=settings.timeout_s,
            poisson=settings.poisson,
            seed=number,
            sources=[f"127.0.{1 + number}.{last}" for last in range(1, 17)],
        )
        for number in range(settings.generators)
    ]


async def measure_phase(server: Server, kind: Kind, factor: float, per_s: float, settings: Settings) -> Phase:
    """Put the server through one load. Cancellation: at once."""
    before = resident_mib(server)
    probe = OpenLoopJob(port=server.port, path="/health", per_s=HEALTH_PER_S, seconds=settings.seconds)
    async with watch_memory(server) as peak:
        *loads, health = await run_jobs(*jobs_of(server, kind, per_s, settings), probe)
        settled = await wait_idle(server)
    return Phase(factor, merged(loads), health, before, max(peak), resident_mib(server), settled)


@asynccontextmanager
async def watch_memory(server: Server) -> AsyncIterator[list[float]]:
    """Collect the server's memory, MiB, every second for as long as the block."""
    seen = [resident_mib(server)]

    async def watch() -> None:
        while True:
            await trio.sleep(1)
            seen.append(resident_mib(server))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield seen
        nursery.cancel_scope.cancel(reason="the block is left")


async def measure(kind: Kind, settings: Settings) -> Overload:
    """Start a server, find its capacity, and overload it. Cancellation: at once; the server is stopped."""
    async with open_ours(*kind.flags, *settings.flags) as server:
        with open_steps(kind.name, 1 + len(settings.factors)) as step:
            step("capacity")
            measured = Overload(kind.name, await measure_capacity(server, kind, settings))
            for factor in settings.factors:
                step(f"{factor:g}×")
                per_s = factor * measured.capacity.goodput
                measured.phases.append(await measure_phase(server, kind, factor, per_s, settings))
    return measured


def show(measured: Sequence[Overload]) -> None:
    """Print the tables."""
    rows = [
        [
            each.kind,
            " · ".join(f"{clients}: {rate:.0f}" for clients, rate in each.capacity.by_clients.items()),
            "refused" if each.capacity.kept_alive is None else f"{each.capacity.kept_alive:.0f}",
        ]
        for each in measured
    ]
    kept = f"{KEEP_ALIVE_CLIENTS} clients, kept alive"
    print_table("Capacity, requests/s", ["requests", "by clients, a connection each", kept], rows)
    phases = [(f"{each.kind}, {phase.factor:g}×", each.capacity, phase) for each in measured for phase in each.phases]
    print_table("How requests ended", ENDS, [[name, *phase.ends()] for name, _, phase in phases])
    rows = [[name, *phase.quality(capacity)] for name, capacity, phase in phases]
    print_table("What they got", QUALITY, rows)
    print_table("Memory, and the load generators", COSTS, [[name, *phase.costs()] for name, _, phase in phases])
    print_table("Promises", ["promise", "worst", "kept"], promises(measured))


def promises(measured: Sequence[Overload]) -> list[list[str]]:
    """Return what a server should keep at any load, what was worst, and whether it was kept."""
    phases = [(each.capacity, phase) for each in measured for phase in each.phases]
    loads = [phase.load for _, phase in phases]
    unanswered = max(load.count(*UNANSWERED) / max(1, load.offered) for load in loads)
    # A load below the capacity cannot be answered at more than it brings.
    above = [phase.load.goodput / capacity.goodput for capacity, phase in phases if phase.factor > 1]
    goodput = min(above, default=math.nan)
    slowest = max(load.latency_ms(0.99, "200") for load in loads) / 1000
    errors = max(sum(load.count(name) for name in counts(load) if name[0] in "45" and name != "429") for load in loads)
    bare = max(load.without_retry_after for load in loads)
    health = max(phase.health.count(*UNANSWERED) for _, phase in phases)
    return [
        ["every request is answered", f"{unanswered:.1%} unanswered", _yes(unanswered == 0)],
        ["goodput stays at 0.9 of the capacity or more", f"{goodput:.2f}", _yes(goodput >= 0.9)],
        [
            f"accepted requests take at most {MAX_QUEUE_S + 1:g} s (p99)",
            f"{slowest:.1f} s",
            _yes(slowest <= MAX_QUEUE_S + 1),
        ],
        ["what is refused is refused with 429", f"{errors} others", _yes(errors == 0)],
        ["refusals have Retry-After", f"{bare} without", _yes(bare == 0)],
        ["/health is answered", f"{health} unanswered", _yes(health == 0)],
    ]


def _yes(kept: bool) -> str:  # noqa: FBT001  (a word for a value)
    return "yes" if kept else "**no**"


def draw(measured: Sequence[Overload], settings: Settings) -> None:
    """Plot goodput, latency and how requests ended, by load."""
    figure, (goodput, latency, ends) = open_figure(3)
    for each in measured:
        factors = [phase.factor for phase in each.phases]
        shares = [phase.load.goodput / each.capacity.goodput for phase in each.phases]
        goodput.plot(factors, shares, marker="o", label=each.kind)
        (drawn,) = latency.plot(factors, [p.load.latency_ms(0.99, "200") for p in each.phases], "o-", label=each.kind)
        refusals = [phase.load.latency_ms(0.99, *REFUSED) for phase in each.phases]
        latency.plot(factors, refusals, "x:", color=drawn.get_color())
        unanswered = [100 * p.load.count(*UNANSWERED) / max(1, p.load.offered) for p in each.phases]
        ends.plot(factors, unanswered, marker="o", label=each.kind)
    goodput.set(title="Goodput ÷ capacity", xlabel="load ÷ capacity", ylim=(0, None))
    latency.set(title="p99, ms: answered (–) and refused (···)", xlabel="load ÷ capacity", yscale="log")
    ends.set(title="Requests without a status, %", xlabel="load ÷ capacity", ylim=(0, 100))
    goodput.legend(frameon=False)
    write_figure(figure, settings.output_dir, "overload")


def as_document(each: Overload) -> dict[str, Any]:
    """Return one kind of requests for JSON: counts and quantiles, not every latency."""
    return {
        "requests": each.kind,
        "capacity": attrs.asdict(each.capacity),
        "phases": [
            {
                "factor": phase.factor,
                "goodput_share": phase.load.goodput / each.capacity.goodput,
                "outcomes": counts(phase.load),
                "health": counts(phase.health),
                **dict(zip(QUALITY[1:], phase.quality(each.capacity), strict=True)),
                **dict(zip(COSTS[1:], phase.costs(), strict=True)),
            }
            for phase in each.phases
        ],
    }


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    machine = describe_machine()
    warn_if_busy(machine)
    measured: list[Overload] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [make(Path(folder)) for name, make in KINDS.items() if not settings.only or name in settings.only]
        for number in range(settings.rounds):
            for kind in chosen:
                name = kind.name + (f", round {number + 1}" if number else "")
                measured.append(await measure(attrs.evolve(kind, name=name), settings))
    show(measured)
    document = {"machine": machine, "settings": settings_document(settings), "loads": [*map(as_document, measured)]}
    write_json(settings.output_dir, "overload", document)
    draw(measured, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure what a server does with more requests than it can compute."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

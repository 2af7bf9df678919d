"""What does a server do with more requests than it can compute? Goodput, refusals and memory at 1× to 10× its capacity.

Capacity is the best goodput of closed-loop clients that open a connection for each request; it is measured again
before each load. Then requests arrive on a timetable, at multiples of it, whether or not earlier ones were answered:
over a new connection each, whose client gives up after ``timeout_s``. Every request is accounted for, and ``/health``
is requested ten times a second meanwhile.

    python -m benchmarks.overload
    python -m benchmarks.overload --only texts --factors 5 --seconds 10
"""

import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import attrs
import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.load import LoadJob, run_load
from benchmarks.machine import stolen_s
from benchmarks.made_models import IMAGES, make_models
from benchmarks.model import MODEL_NAME, Texts
from benchmarks.open_loop import (
    OpenLoopJob,
    merged,
    run_open_loop,
    run_open_loops,
)
from benchmarks.overload_results import KEEP_ALIVE_CLIENTS, Capacity, Overload, Phase, as_document, draw, show
from benchmarks.report import RESULTS, Flags, Names, Report, command_of, open_steps
from benchmarks.scenarios import body_of, jpeg_url
from benchmarks.server_state import resident_mib, wait_idle, watch_memory
from benchmarks.servers import Server, open_ours

TOKENS = 34

TEXTS_PER_BATCH = 64

PICTURE = (256, 256)

HEALTH_PER_S = 10.0


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` of load at each of the ``factors`` of the capacity, of ``only`` these kinds of request.

    ``generators`` processes send it, each from addresses of its own. In each round every server is started once.
    """

    rounds: int = 1
    seconds: float = 60.0
    capacity_seconds: float = 10.0
    factors: Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative=())] = (1.0, 2.0, 5.0, 10.0)
    only: Names = ()
    flags: Flags = ()
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
    clients: tuple[int, ...] = (16, 64)
    """Numbers of closed-loop clients, of which the best tells the capacity."""


def texts(_: Path) -> Kind:
    """Return requests of a text each."""
    return Kind("texts", [body_of(MODEL_NAME, input=text) for text in Texts().make(512, TOKENS)])


def texts_to_several_processes(folder: Path) -> Kind:
    """Return the same, for a server of several processes."""
    flags = ("--api-workers", "4", "--engine", "process")
    return attrs.evolve(texts(folder), name="processes", flags=flags)


def batches(_: Path) -> Kind:
    """Return requests of many texts each."""
    made = Texts()
    return Kind(
        "batches", [body_of(MODEL_NAME, input=made.make(TEXTS_PER_BATCH, TOKENS)) for _ in range(32)], clients=(2, 4)
    )


def images(folder: Path) -> Kind:
    """Return requests of an image each, none of them in the cache."""
    bodies = [body_of(IMAGES, input=[jpeg_url(seed, PICTURE)], modality="image") for seed in range(64)]
    return Kind("images", bodies, (f"{IMAGES}={make_models(folder)[IMAGES]}", "--plugins", "benchmarks.no_image_cache"))


KINDS: dict[str, Callable[[Path], Kind]] = {
    "texts": texts,
    "processes": texts_to_several_processes,
    "batches": batches,
    "images": images,
}
"""The kinds of requests, by the names that ``--only`` takes; the argument is a folder for models."""


async def measure_capacity(server: Server, kind: Kind, settings: Settings) -> Capacity:
    """Return what the server answers to closed-loop clients. Cancellation: at once."""
    seconds = settings.capacity_seconds
    by_clients = {}
    for clients in (kind.clients[0], *kind.clients):  # the first one warms up
        by_clients[clients] = await measure_goodput(server, kind, clients, settings)
    kept = LoadJob(port=server.port, bodies=kind.bodies, clients=KEEP_ALIVE_CLIENTS, seconds=seconds)
    with suppress(subprocess.CalledProcessError):  # refused: the load generator takes nothing but 200
        return Capacity(by_clients, (await run_load(kept)).requests_per_s)
    return Capacity(by_clients, None)


async def measure_goodput(server: Server, kind: Kind, clients: int, settings: Settings) -> float:
    """Return the requests/s of closed-loop clients. Cancellation: at once."""
    job = OpenLoopJob(port=server.port, bodies=kind.bodies, clients=clients, seconds=settings.capacity_seconds)
    return (await run_open_loop(job)).goodput


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


async def measure_phase(server: Server, kind: Kind, factor: float, clients: int, settings: Settings) -> Phase:
    """Put the server through one load, ``factor`` times what ``clients`` get just before. Cancellation: at once."""
    capacity = await measure_goodput(server, kind, clients, settings)
    per_s = factor * capacity
    stolen, began = stolen_s(), trio.current_time()
    before = resident_mib(server)
    probe = OpenLoopJob(port=server.port, path="/health", per_s=HEALTH_PER_S, seconds=settings.seconds)
    async with watch_memory(server) as samples:
        *loads, health = await run_open_loops(*jobs_of(server, kind, per_s, settings), probe)
        settled = await wait_idle(server)
    stolen = (stolen_s() - stolen) / (trio.current_time() - began)
    return Phase(
        factor,
        capacity,
        merged(loads),
        health,
        before,
        max(mib for _, mib in samples),
        resident_mib(server),
        settled,
        stolen,
    )


async def measure(kind: Kind, settings: Settings) -> Overload:
    """Start a server, find its capacity, and overload it. Cancellation: at once; the server is stopped."""
    async with open_ours(*kind.flags, *settings.flags) as server:
        with open_steps(kind.name, 1 + len(settings.factors)) as step:
            step("capacity")
            measured = Overload(kind.name, await measure_capacity(server, kind, settings))
            for factor in settings.factors:
                step(f"{factor:g}×")
                clients = measured.capacity.best_clients
                measured.phases.append(await measure_phase(server, kind, factor, clients, settings))
    return measured


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("overload", settings)
    measured: list[Overload] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [make(Path(folder)) for name, make in KINDS.items() if not settings.only or name in settings.only]
        for number in range(settings.rounds):
            for kind in chosen:
                name = kind.name + (f", round {number + 1}" if number else "")
                measured.append(await measure(attrs.evolve(kind, name=name), settings))
    show(measured)
    report.write(loads=[*map(as_document, measured)])
    draw(measured, settings.output_dir)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

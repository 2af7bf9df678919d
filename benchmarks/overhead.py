"""How much does HTTP add to an offline call? Shown at one client, for several servers.

Offline is our own runner called in Python, from a text to its vector; online is one client that requests the
same over HTTP. What HTTP takes by itself is shown by a server with nothing to do, which answers two letters. All
servers and the offline process stay alive, and are measured in turns.

    python -m benchmarks.overhead
"""

from pathlib import Path
from statistics import median
from typing import Any

import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.answers import bodies_of, check_answers
from benchmarks.forward_alone import ForwardAlone
from benchmarks.load import LoadJob, run_load
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME, Texts, oracle_vectors
from benchmarks.offline import open_offline
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
from benchmarks.variants import ENGINES, FRONT_ENDS, NAIVE, OURS, Variant, known, open_variants

TOKENS = 34

TEXTS = 256

CHECKED_TEXTS = 32

IDLE = "a server with nothing to do"

COMPARED = (OURS, *ENGINES, *FRONT_ENDS[1:], NAIVE)


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each server and round, half of it for each offline measurement."""

    rounds: int = 5
    seconds: float = 6.0
    output_dir: Path = RESULTS


@frozen
class Overhead:
    """One server compared with the offline call, at one client; milliseconds, medians over the rounds."""

    server: str
    online_p50_ms: float
    online_mean_ms: float
    offline_p50_ms: float
    offline_mean_ms: float
    added_p50_ms: float
    added_mean_ms: float
    over_forward_alone: float
    """Its median latency over a forward pass's, with whichever number of threads that is fastest."""

    @classmethod
    def of(cls, name: str, measured: Rounds[str], alone: ForwardAlone) -> "Overhead":
        """Return what one server adds."""
        online, offline, forward = measured.results[name], alone.rounds(1, way="text"), alone.rounds(1)
        return cls(
            name,
            measured.median(name, "p50_ms"),
            measured.median(name, "mean_ms"),
            median(result.p50_ms for result in offline),
            median(result.mean_ms for result in offline),
            median_difference(online, offline, "p50_ms"),
            median_difference(online, offline, "mean_ms"),
            median_ratio(online, "p50_ms", forward, "p50_ms"),
        )


async def measure(
    servers: dict[Variant, Server], idle: Server, bodies: list[str], alone: ForwardAlone, settings: Settings
) -> Rounds[str]:
    """Measure the offline call and one client of each server, round after round."""
    measured = Rounds[str]()
    jobs = {
        variant.name: LoadJob(port=server.port, bodies=bodies, seconds=settings.seconds)
        for variant, server in servers.items()
    }
    jobs[IDLE] = LoadJob(port=idle.port, path="/health", seconds=settings.seconds)
    with open_steps("measuring", settings.rounds * (alone.steps + len(jobs))) as step:
        for _ in range(settings.rounds):
            await alone.measure(step)
            for name, job in jobs.items():
                step(f"{name}, 1 client")
                measured.add(name, await run_load(job))
    return measured


def show(overheads: list[Overhead], measured: Rounds[str], alone: ForwardAlone) -> None:
    """Print the tables."""
    threads = alone.best_threads(1, "text")
    columns = [
        "server",
        "online p50 / mean ms",
        f"offline ({threads} threads) p50 / mean ms",
        "online − offline p50 / mean ms",
        "online p50 ÷ forward pass alone",
    ]
    rows = [
        [
            one.server,
            f"{one.online_p50_ms:.2f} / {one.online_mean_ms:.2f}",
            f"{one.offline_p50_ms:.2f} / {one.offline_mean_ms:.2f}",
            f"{one.added_p50_ms:.2f} / {one.added_mean_ms:.2f}",
            f"{one.over_forward_alone:.2f}",
        ]
        for one in overheads
    ]
    print_table(f"what HTTP adds at one client, one text of {TOKENS} tokens", columns, rows)
    rows = [[IDLE, f"{measured.median(IDLE, 'p50_ms'):.2f}", f"{measured.median(IDLE, 'mean_ms'):.2f}"]]
    print_table("HTTP by itself, one client", ["", "p50 ms", "mean ms"], rows)


def draw(overheads: list[Overhead], settings: Settings) -> None:
    """Plot what each server adds to the offline call."""
    figure, (axis,) = open_figure(1)
    names = [one.server for one in overheads]
    axis.barh(names, [one.offline_p50_ms for one in overheads], label="offline", color="C7")
    bars = axis.barh(
        names,
        [one.added_p50_ms for one in overheads],
        left=[one.offline_p50_ms for one in overheads],
        label="added online",
        color="C0",
    )
    axis.bar_label(bars, [f"{one.added_p50_ms:+.2f}" for one in overheads], padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set(title="One client: median latency", xlabel="ms")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "overhead")


def as_document(overheads: list[Overhead], measured: Rounds[str], alone: ForwardAlone) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        "tokens": TOKENS,
        "overheads": [{name: getattr(one, name) for name in Overhead.__match_args__} for one in overheads],
        "online": measured.as_document("server"),
        "offline": alone.as_document(),
    }


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    machine = describe_machine()
    warn_if_busy(machine)
    texts = Texts().make(TEXTS, TOKENS)
    oracle = oracle_vectors(texts[:CHECKED_TEXTS])
    async with open_offline() as offline, open_variants(known(COMPARED)) as servers, open_idle() as idle:
        cosines = {
            variant.name: await check_answers(
                server.url, texts[:CHECKED_TEXTS], oracle, answers_with=variant.answers_with
            )
            for variant, server in servers.items()
        }
        alone = ForwardAlone(offline, (1,), settings.seconds / 2, TOKENS, ("transformers", "text"))
        measured = await measure(servers, idle, bodies_of(texts), alone, settings)
    overheads = [Overhead.of(variant.name, measured, alone) for variant in servers]
    show(overheads, measured, alone)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "model": MODEL_NAME,
        "least_cosine_with_float32": cosines,
        **as_document(overheads, measured, alone),
    }
    write_json(settings.output_dir, "overhead", document)
    draw(overheads, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure what HTTP adds to an offline call at one client."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

"""How long do short queries wait behind long documents and another client's large request? Padding, too.

Mixed lengths: requests of one input on a timetable, 95 % of 16 tokens and 5 % of 512, at 70 % of the rate that the
server was found to keep up with; then the short ones alone, on the same timetable. A noisy neighbour: single queries of
34 tokens on a timetable, while one client posts 2048 such inputs, again and again; then the queries alone.

    python -m benchmarks.scheduling
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import cyclopts
import numpy as np
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.answers import ask, embeddings_body, vectors_of
from benchmarks.load import LoadJob, LoadResult, run_load, run_loads
from benchmarks.model import MODEL_NAME, Texts, check_vectors, oracle_vectors
from benchmarks.report import RESULTS, Report, command_of, open_figure, open_progress, print_table, write_figure
from benchmarks.server_state import samples_of
from benchmarks.servers import Server, open_ours

SHORT, LONG, SINGLE = 16, 512, 34

LONG_SHARE = 0.05

OF_CAPACITY = 0.7

CAPACITY_CLIENTS = 32

CAPACITY_S = 5.0
"""A timetable for more than the server keeps up with would show nothing, so this is measured for no less."""

WARM_UP_S = 2.0

NOISY_INPUTS = 2048

TIMETABLES = 64
"""Clients that a timetable is spread over. One connection answers one request at a time: with as many of them, a stall
delays the requests sent during it, and not also later ones."""

WITH, WITHOUT = "with", "without"


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` for each load and round; ``single_rate`` queries a second with a noisy neighbour."""

    rounds: int = 5
    seconds: float = 10.0
    single_rate: float = 10.0
    output_dir: Path = RESULTS


@frozen
class TokensComputed:
    """What a server has computed since its start."""

    real: float
    padded: float

    def waste_since(self, before: "TokensComputed") -> float:
        """Return the share of padding in all that was computed in between."""
        padded = self.padded - before.padded
        return 1 - (self.real - before.real) / padded if padded else 0.0


async def scrape_tokens(server: Server) -> TokensComputed:
    """Return the server's counts of tokens."""
    names = ("trio_pool_serve_tokens_total", "trio_pool_serve_batch_tokens_sum")
    samples = {sample.name: sample.value for sample in await samples_of(server, *names)}
    return TokensComputed(*(samples[name] for name in names))


body_of = partial(embeddings_body, encoding_format="base64")


@frozen
class Bodies:
    """The bodies of all requests."""

    short: list[str]
    long: list[str]
    single: list[str]
    noisy: list[str]

    @classmethod
    def make(cls, texts: Texts) -> "Bodies":
        """Return the bodies; the texts are the same in every run."""
        return cls(
            short=[body_of(text) for text in texts.make(512, SHORT)],
            long=[body_of(text) for text in texts.make(64, LONG)],
            single=[body_of(text) for text in texts.make(512, SINGLE)],
            noisy=[body_of(texts.make(NOISY_INPUTS, SINGLE))],
        )

    @property
    def mixed(self) -> list[str]:
        """Short ones, with long ones between them at ``LONG_SHARE``."""
        every = round(1 / LONG_SHARE) - 1
        slices = [self.short[start : start + every] for start in range(0, len(self.short) - every, every)]
        return [body for some, long in zip(slices, self.long, strict=False) for body in (*some, long)]


@frozen
class Scenario:
    """Clients whose latency is measured, and clients that may delay them."""

    name: str
    measured: LoadJob
    disturbance: LoadJob

    async def run(self, *, disturbed: bool) -> list[LoadResult]:
        """Return the results of the measured clients, then of the disturbing ones if ``disturbed``."""
        return await run_loads(self.measured, *([self.disturbance] if disturbed else []))


def on_timetable(port: int, bodies: list[str], per_s: float, seconds: float) -> LoadJob:
    """Return a job of ``per_s`` requests a second, whether or not earlier answers have arrived."""
    return LoadJob(port=port, bodies=bodies, per_s=per_s, seconds=seconds)


async def scenarios(server: Server, bodies: Bodies, settings: Settings) -> tuple[float, list[Scenario]]:
    """Return the rate of mixed requests that the server keeps up with, and the scenarios."""
    load = LoadJob(
        port=server.port,
        bodies=bodies.mixed,
        clients=CAPACITY_CLIENTS,
        seconds=max(CAPACITY_S, settings.seconds),
        ramp_s=WARM_UP_S,
    )
    capacity = (await run_load(load)).requests_per_s
    timetable = partial(on_timetable, server.port, seconds=settings.seconds)
    rate = OF_CAPACITY * capacity
    return capacity, [
        Scenario(
            "mixed lengths",
            timetable(bodies.short, (1 - LONG_SHARE) * rate),
            timetable(bodies.long, LONG_SHARE * rate),
        ),
        Scenario(
            "noisy neighbour",
            timetable(bodies.single, settings.single_rate),
            LoadJob(port=server.port, bodies=bodies.noisy, clients=1, seconds=settings.seconds),
        ),
    ]


@define
class Observations:
    """All rounds of one scenario; each dictionary by ``WITH`` and ``WITHOUT`` the disturbance."""

    asked: dict[str, list[LoadResult]] = field(factory=partial(defaultdict, list))
    waste: dict[str, list[float]] = field(factory=partial(defaultdict, list))
    disturbance: list[LoadResult] = field(factory=list)

    def median_ms(self, which: str, quantity: str) -> float:
        """Return the median over the rounds."""
        return median(getattr(result, quantity) for result in self.asked[which])

    @property
    def p99_ratio(self) -> float:
        """p99 with the disturbance over that without: the median of each round's ratio."""
        pairs = zip(self.asked[WITH], self.asked[WITHOUT], strict=True)
        return median(disturbed.p99_ms / quiet.p99_ms for disturbed, quiet in pairs)


async def measure(server: Server, todo: list[Scenario], settings: Settings) -> dict[str, Observations]:
    """Put the server through the scenarios, without and with the disturbance in turns, round after round."""
    measured: dict[str, Observations] = defaultdict(Observations)
    with open_progress() as progress:
        task = progress.add_task("", total=settings.rounds * len(todo) * 2)
        for _ in range(settings.rounds):
            for scenario in todo:
                for which in (WITHOUT, WITH):
                    progress.update(task, description=f"{scenario.name}: {which}")
                    seen = measured[scenario.name]
                    before = await scrape_tokens(server)
                    result, *disturbance = await scenario.run(disturbed=which == WITH)
                    seen.asked[which].append(result)
                    seen.waste[which].append((await scrape_tokens(server)).waste_since(before))
                    seen.disturbance += disturbance
                    progress.advance(task)
    return measured


async def check(server: Server, by_length: Sequence[Sequence[str]]) -> float:
    """Return the least cosine with the oracle's vectors when all lengths are requested at once.

    Raises ``WrongAnswerError``. The oracle computes each length by itself, without padding.
    """
    texts = [[json.loads(body)["input"] for body in bodies] for bodies in by_length]
    answer = await ask(server.url, embeddings_body([text for some in texts for text in some]))
    return check_vectors(vectors_of(answer.json()), np.concatenate([oracle_vectors(some) for some in texts]))


def show(measured: dict[str, Observations]) -> None:
    """Print the table."""
    columns = ["short queries", "p50 ms", "p99 ms", "p50 ms disturbed", "p99 ms disturbed", "p99 ratio", "padding"]
    rows = [
        [
            name,
            *(f"{seen.median_ms(which, q):.1f}" for which in (WITHOUT, WITH) for q in ("p50_ms", "p99_ms")),
            f"{seen.p99_ratio:.2f}",
            f"{median(seen.waste[WITH]):.1%}",
        ]
        for name, seen in measured.items()
    ]
    print_table("do short queries wait?", columns, rows)


def draw(measured: dict[str, Observations], settings: Settings) -> None:
    """Plot p50 and p99 of each scenario, with and without the disturbance, and the padding."""
    figure, (latencies, waste) = open_figure(2)
    bars = [(name, quantity) for name in measured for quantity in ("p50_ms", "p99_ms")]
    for offset, (which, label) in enumerate(((WITHOUT, "alone"), (WITH, "disturbed"))):
        values = [measured[name].median_ms(which, quantity) for name, quantity in bars]
        drawn = latencies.bar([i + 0.4 * offset for i in range(len(bars))], values, width=0.38, label=label)
        latencies.bar_label(drawn, fmt="%.1f")
    names = [f"{name}\n{quantity.removesuffix('_ms')}" for name, quantity in bars]
    latencies.set_xticks([i + 0.2 for i in range(len(bars))], names)
    latencies.set(title="Short queries, ms", yscale="log")
    latencies.legend(frameon=False)
    drawn = waste.bar(list(measured), [100 * median(seen.waste[WITH]) for seen in measured.values()], width=0.4)
    waste.bar_label(drawn, fmt="%.1f")
    waste.set(title="Padding, % of the tokens computed", ylim=(0, 100))
    write_figure(figure, settings.output_dir, "scheduling")


def as_document(measured: dict[str, Observations], todo: list[Scenario]) -> list[dict[str, Any]]:
    """Return everything for JSON."""
    return [
        {
            "scenario": scenario.name,
            "asked_per_s": scenario.measured.per_s,
            "p99_ratio": measured[scenario.name].p99_ratio,
            **attrs.asdict(measured[scenario.name]),
        }
        for scenario in todo
    ]


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    report = Report("scheduling", settings)
    bodies = Bodies.make(Texts())
    checked = [bodies.short[:16], bodies.long[:2], bodies.single[:16]]
    async with open_ours(f"--max-model-len={LONG}") as server:
        cosine = await check(server, checked)
        capacity, todo = await scenarios(server, bodies, settings)
        measured = await measure(server, todo, settings)
    show(measured)
    report.write(
        model=MODEL_NAME,
        tokens={"short": SHORT, "long": LONG, "single": SINGLE, "long_share": LONG_SHARE},
        least_cosine_with_float32=cosine,
        mixed_capacity_per_s=capacity,
        scenarios=as_document(measured, todo),
    )
    draw(measured, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

"""Does the event loop stay free? ``/health`` and the loop's lag under load, with offloading on and off.

``/health`` is requested every 10 ms by a separate process, whether or not earlier answers have arrived. The lag
is the server's own measurement: how late the loop wakes a task that sleeps.

    python -m benchmarks.responsiveness
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import attrs
import cyclopts
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.answers import check_answers
from benchmarks.load import LoadJob, LoadResult, health_probe, run_load, run_loads
from benchmarks.made_models import make_models
from benchmarks.model import MODEL_NAME, Texts, oracle_vectors
from benchmarks.report import RESULTS, Report, command_of, open_figure, open_progress, print_table, write_figure
from benchmarks.scenarios import FLAGS, TOKENS, Scenario, scenarios
from benchmarks.server_state import samples_of
from benchmarks.servers import Server, open_on_loop, open_ours

QUANTITIES = ("p50_ms", "p95_ms", "p99_ms", "max_ms")

LAG_METRIC = "trio_pool_serve_loop_lag_seconds"

Buckets: TypeAlias = dict[float, float]
"""Upper bound in seconds → samples at most that late, since the server's start."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``seconds`` for each scenario, server and round."""

    rounds: int = 5
    seconds: float = 6.0
    output_dir: Path = RESULTS


@frozen
class Lag:
    """How late the loop was: each is the upper bound of the histogram's bucket, so at most that."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def between(cls, before: Buckets, after: Buckets) -> "Lag":
        """Return the lag of the samples taken between two scrapes."""
        counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
        total = counts[float("inf")]

        def within(share: float) -> float:
            return next(1e3 * bound for bound, count in counts.items() if count >= share * total)

        return cls(int(total), within(0.5), within(0.99), within(1.0))


async def scrape_lag(server: Server) -> Buckets:
    """Return the server's histogram of loop lag."""
    return {float(sample.labels["le"]): sample.value for sample in await samples_of(server, f"{LAG_METRIC}_bucket")}


@define
class Observations:
    """All rounds of one scenario on one server."""

    health: list[LoadResult] = field(factory=list)
    loads: list[LoadResult] = field(factory=list)
    lags: list[Lag] = field(factory=list)

    def health_ms(self, quantity: str) -> float:
        """Return the median over the rounds, but the largest of the maxima."""
        over: Callable[[list[float]], float] = max if quantity == "max_ms" else median
        return over([getattr(result, quantity) for result in self.health])

    def lag_ms(self, quantity: str) -> float:
        """Return the same for the loop's lag."""
        over: Callable[[list[float]], float] = max if quantity == "max_ms" else median
        return over([getattr(lag, quantity) for lag in self.lags])


Measured: TypeAlias = dict[tuple[str, str], Observations]
"""By scenario and server."""


async def observe(server: Server, scenario: Scenario, seconds: float, into: Observations) -> None:
    """Request ``/health`` while the server is busy with a scenario."""
    probe = health_probe(server.port, seconds)
    before = await scrape_lag(server)
    if scenario.clients:
        load = LoadJob(port=server.port, bodies=scenario.bodies, clients=scenario.clients, seconds=seconds)
        busy, health = await run_loads(load, probe)
        into.loads.append(busy)
    else:
        health = await run_load(probe)
    into.health.append(health)
    into.lags.append(Lag.between(before, await scrape_lag(server)))


async def measure(servers: list[Server], settings: Settings) -> Measured:
    """Put the servers through the scenarios in turns, round after round."""
    measured: Measured = defaultdict(Observations)
    todo = scenarios()
    with open_progress() as progress:
        task = progress.add_task("", total=settings.rounds * len(todo) * len(servers))
        for _ in range(settings.rounds):
            for scenario in todo:
                for server in servers:
                    progress.update(task, description=f"{scenario.name}: {server.name}")
                    await observe(server, scenario, settings.seconds, measured[scenario.name, server.name])
                    progress.advance(task)
    return measured


def show(measured: Measured) -> None:
    """Print the table."""
    columns = ["busy with", "offloading", *(f"/health {quantity.replace('_', ' ')}" for quantity in QUANTITIES)]
    columns += ["lag p99 ms ≤", "lag max ms ≤"]
    rows = [
        [
            scenario,
            "on" if server == "ours" else "off",
            *(f"{seen.health_ms(quantity):.2f}" for quantity in QUANTITIES),
            *(f"{seen.lag_ms(quantity):g}" for quantity in ("p99_ms", "max_ms")),
        ]
        for (scenario, server), seen in measured.items()
    ]
    print_table("does the loop stay free?", columns, rows)


def draw(measured: Measured, settings: Settings) -> None:
    """Plot ``/health`` p50, p99 and maximum of each scenario, with offloading on and off."""
    quantities = ("p50_ms", "p99_ms", "max_ms")
    figure, axes = open_figure(len(quantities))
    names = list(dict.fromkeys(scenario for scenario, _ in measured))
    for axis, quantity in zip(axes, quantities, strict=True):
        for offset, (server, label) in enumerate((("on the loop", "offloading off"), ("ours", "offloading on"))):
            values = [measured[name, server].health_ms(quantity) for name in names]
            places = [index + 0.4 * offset for index in range(len(names))]
            bars = axis.barh(places, values, height=0.38, label=label, color=("C1", "C0")[offset])
            axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_yticks([index + 0.2 for index in range(len(names))], names if axis is axes[0] else [""] * len(names))
        axis.set(title=f"/health {quantity.replace('_ms', '')}, ms", xscale="log")
        axis.margins(x=0.2)
    axes[-1].legend(frameon=False)
    write_figure(figure, settings.output_dir, "responsiveness")


def as_document(measured: Measured) -> list[dict[str, Any]]:
    """Return everything for JSON."""
    return [
        {"scenario": scenario, "offloading": server == "ours", **attrs.asdict(seen)}
        for (scenario, server), seen in measured.items()
    ]


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    report = Report("responsiveness", settings)
    texts = Texts().make(32, TOKENS)
    oracle = oracle_vectors(texts)
    with tempfile.TemporaryDirectory() as folder:
        made = [f"{name}={path}" for name, path in make_models(Path(folder)).items()]
        async with open_ours(*made, *FLAGS) as ours, open_on_loop(*made, *FLAGS) as on_loop:
            cosines = {server.name: await check_answers(server.url, texts, oracle) for server in (ours, on_loop)}
            measured = await measure([ours, on_loop], settings)
    show(measured)
    report.write(model=MODEL_NAME, least_cosine_with_float32=cosines, scenarios=as_document(measured))
    draw(measured, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

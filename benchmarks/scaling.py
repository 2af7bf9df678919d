"""What do 1 to 1,000 engines do under load, and when some of them are lost? Simulated, beside what a model predicts.

The server's own queue, admission and routing against a virtual clock: ``simulated_cluster.py``. What batches, requests
and links take was measured by ``scaling_constants.py``; a GPU's numbers are assumed. The engines compute 80 % or 120 %
of what they can; a quarter of them are four times slower; a tenth of them are lost without a word for three seconds.

    python -m benchmarks.scaling
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import attrs
import cyclopts
from attrs import frozen
from cyclopts import Parameter

from benchmarks.capacity import ASSUMED_GPU, Measured, predict, with_enough_processes
from benchmarks.machine import describe_machine
from benchmarks.report import (
    RESULTS,
    open_figure,
    open_steps,
    print_table,
    settings_document,
    write_figure,
    write_json,
)
from benchmarks.simulated_cluster import simulate
from benchmarks.simulated_scenario import Device, Outcome, Scenario

NORMAL, OVERLOAD, LOSS, RETRIES, UNEQUAL = "80 %", "120 %", "a tenth is lost", "the same, retried", "a quarter is slow"

FEW = "80 %, a quarter of the API processes"

AWAY_S = 3.0

MOST_S = 60.0

COMPARED_AT = 100
"""Engines with which numbers of candidates and of API processes, and of their machines, are compared."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: about ``requests`` in each simulation, for ``seconds`` at least; ``rounds`` are seeds."""

    rounds: int = 1
    requests: int = 20_000
    seconds: float = 6.0
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 2, 10, 100, 1000)
    gpu_sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 10)
    candidates: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (2, 8, 100)
    processes: int = 2
    output_dir: Path = RESULTS


@frozen
class Case:
    """One simulation: of which table, under which name."""

    table: str
    name: str
    scenario: Scenario


SIZES, GPU_SIZES, CANDIDATES, HOSTS = "sizes", "GPU sizes", "candidates", "hosts"


def cases(settings: Settings, measured: Measured) -> list[Case]:
    """Return all that is simulated, the longest first."""
    found = []
    for size in sorted(settings.sizes, reverse=True):
        found += [
            Case(SIZES, name, each) for name, each in _scenarios(settings, measured, measured.device, size).items()
        ]
    for size in sorted(settings.gpu_sizes, reverse=True):
        scenarios = _scenarios(settings, measured, ASSUMED_GPU, size)
        found += [Case(GPU_SIZES, name, scenarios[name]) for name in (NORMAL, OVERLOAD)]
    scenarios = _scenarios(settings, measured, measured.device, COMPARED_AT)
    for count in settings.candidates:
        for name in (NORMAL, UNEQUAL):
            found.append(Case(CANDIDATES, name, attrs.evolve(scenarios[name], compared=count)))
    overload = attrs.evolve(scenarios[NORMAL], load=1.5, seconds=3 * settings.seconds, warm_s=2 * settings.seconds)
    for per_host in (overload.api_processes, 2):
        found.append(Case(HOSTS, "150 %", attrs.evolve(overload, processes_per_host=per_host)))
    return found


def _scenarios(settings: Settings, measured: Measured, device: Device, size: int) -> Mapping[str, Scenario]:
    """Return what is done with a number of engines."""
    base = Scenario(device=device, costs=measured.costs, engines=size)
    seconds = min(MOST_S, max(settings.seconds, settings.requests / base.requests_per_s))
    base = with_enough_processes(attrs.evolve(base, seconds=seconds))
    lost_at_s = max(base.warm_s, 0.35 * seconds)
    loss = attrs.evolve(base, lost_engines=max(1, size // 10), lost_at_s=lost_at_s, back_at_s=lost_at_s + AWAY_S)
    scenarios = {NORMAL: base, OVERLOAD: attrs.evolve(base, load=1.2)}
    if size > 1:
        scenarios[LOSS] = loss
    if 1 < size <= COMPARED_AT:  # a thousand engines take minutes
        scenarios[RETRIES] = attrs.evolve(loss, retries_lost=True)
    if 4 <= size <= COMPARED_AT:
        scenarios[UNEQUAL] = with_enough_processes(attrs.evolve(base, slow_engines=size // 4))
    if size == COMPARED_AT:
        scenarios[FEW] = attrs.evolve(base, api_processes=base.api_processes // 4)
    return scenarios


def run(settings: Settings, todo: Sequence[Case]) -> list[list[Outcome]]:
    """Return the outcomes of each case, by seeds."""
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        futures = {
            pool.submit(simulate, attrs.evolve(case.scenario, seed=seed)): (number, case)
            for number, case in enumerate(todo)
            for seed in range(settings.rounds)
        }
        outcomes: list[list[Outcome]] = [[] for _ in todo]
        with open_steps("simulations", len(futures)) as step:
            for future in as_completed(futures):
                number, case = futures[future]
                step(f"{case.scenario.engines} engines, {case.name}")
                outcomes[number].append(future.result())
    return outcomes


def middle(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the median of a number of all seeds."""
    return float(median([getattr(each, name) for each in outcomes]))


def show_sizes(title: str, found: Sequence[tuple[Case, list[Outcome]]]) -> None:
    """Print what came of each number of engines."""
    rows = []
    for case, outcomes in sorted(found, key=lambda each: each[0].scenario.engines):
        scenario, total = case.scenario, middle(outcomes, "offered")
        rows.append(
            [
                str(scenario.engines),
                str(scenario.api_processes),
                case.name,
                f"{scenario.requests_per_s:.0f}",
                f"{middle(outcomes, 'goodput_per_s'):.0f}",
                *(f"{100 * middle(outcomes, name) / total:.2f}" for name in ("refused", "failed")),
                *(f"{1e3 * middle(outcomes, name):.0f}" for name in ("p50_s", "p99_s")),
                f"{middle(outcomes, 'busy'):.2f}",
                f"{middle(outcomes, 'imbalance'):.2f}",
                *(f"{middle(outcomes, name):.0f}" for name in ("routing_us", "admission_us")),
            ]
        )
    columns = [
        "engines",
        "API processes",
        "load",
        "offered/s",
        "goodput/s",
        "refused %",
        "failed %",
        "p50 ms",
        "p99 ms",
    ]
    print_table(title, [*columns, "busy", "imbalance", "routing µs/row", "admission µs/request"], rows)


def show_model(found: Sequence[tuple[Case, list[Outcome]]]) -> None:
    """Print what the model predicts, beside what was simulated where something was at its limit."""
    rows = []
    for case, outcomes in sorted(found, key=lambda each: each[0].scenario.engines):
        if case.name not in (OVERLOAD, FEW):
            continue
        scenario, capacity = case.scenario, predict(case.scenario)
        expected = min(capacity.requests_per_s, scenario.requests_per_s)
        goodput = middle(outcomes, "goodput_per_s")
        rows.append(
            [
                f"{scenario.engines} × {scenario.device.name}",
                str(scenario.api_processes),
                f"{100 * scenario.link_share:.1f}",
                *(f"{each:.0f}" for each in (capacity.engines_per_s, capacity.api_per_s, expected, goodput)),
                f"{100 * (goodput / expected - 1):+.1f} %",
            ]
        )
    columns = ["engines", "API processes", "links, % of their time", "engines: requests/s", "API processes: requests/s"]
    print_table("The model, requests/s", [*columns, "prediction", "simulated", "deviation"], rows)


def show_candidates(found: Sequence[tuple[Case, list[Outcome]]]) -> None:
    """Print what the number of engines buys that are compared for a row."""
    rows = [
        [
            str(case.scenario.compared),
            case.name,
            *(f"{1e3 * middle(outcomes, name):.0f}" for name in ("p50_s", "p99_s")),
            f"{middle(outcomes, 'imbalance'):.2f}",
            f"{middle(outcomes, 'routing_us'):.0f}",
        ]
        for case, outcomes in found
    ]
    columns = ["candidates", "load", "p50 ms", "p99 ms", "imbalance", "routing µs/row"]
    print_table(f"{COMPARED_AT} engines, by how many are compared", columns, rows)


def show_hosts(found: Sequence[tuple[Case, list[Outcome]]]) -> None:
    """Print what admission knows of other machines' API processes."""
    rows = [
        [
            str(-(-case.scenario.api_processes // case.scenario.processes_per_host)),
            f"{middle(outcomes, 'goodput_per_s'):.0f}",
            f"{100 * middle(outcomes, 'refused') / middle(outcomes, 'offered'):.1f}",
            *(f"{middle(outcomes, name):.2f}" for name in ("p50_s", "p99_s")),
        ]
        for case, outcomes in found
    ]
    columns = ["machines with API processes", "goodput/s", "refused %", "p50 s", "p99 s"]
    print_table(f"{COMPARED_AT} engines at 150 %, --max-queue-s 1", columns, rows)


def plot(found: Sequence[tuple[Case, list[Outcome]]], folder: Path) -> None:
    """Draw goodput and latency by the number of engines."""
    figure, (goodput, latency) = open_figure(2)
    for name in (NORMAL, OVERLOAD, LOSS, RETRIES, UNEQUAL):
        points = sorted((case.scenario.engines, outcomes) for case, outcomes in found if case.name == name)
        sizes = [size for size, _ in points]
        goodput.loglog(sizes, [middle(outcomes, "goodput_per_s") for _, outcomes in points], "o", label=name)
        latency.loglog(sizes, [middle(outcomes, "p99_s") for _, outcomes in points], "o-", label=name)
    predicted = sorted(
        (case.scenario.engines, predict(case.scenario).requests_per_s) for case, _ in found if case.name == OVERLOAD
    )
    goodput.loglog(*zip(*predicted, strict=True), "k:", label="the model's capacity")
    goodput.set(title="Simulated goodput", xlabel="engines", ylabel="requests/s")
    latency.set(title="Simulated p99", xlabel="engines", ylabel="s")
    goodput.legend(frameon=False)
    write_figure(figure, folder, "scaling")


def main(settings: Settings = Settings()) -> None:
    """Simulate, and compare with the model."""
    machine = describe_machine()
    todo = cases(settings, Measured.read())
    outcomes = run(settings, todo)
    by_table: dict[str, list[tuple[Case, list[Outcome]]]] = {}
    for case, found in zip(todo, outcomes, strict=True):
        by_table.setdefault(case.table, []).append((case, found))
    show_sizes("Engines of one core each, simulated", by_table[SIZES])
    show_sizes("Engines with a GPU whose speed is assumed, simulated", by_table[GPU_SIZES])
    show_model([*by_table[SIZES], *by_table[GPU_SIZES]])
    show_candidates(by_table[CANDIDATES])
    show_hosts(by_table[HOSTS])
    plot(by_table[SIZES], settings.output_dir)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "simulations": [
            {"table": case.table, "case": case.name, "scenario": _document(case.scenario)}
            | {"outcomes": list(map(_document, found))}
            for case, found in zip(todo, outcomes, strict=True)
        ],
    }
    write_json(settings.output_dir, "scaling", document)


def _document(record: Scenario | Outcome) -> dict[str, Any]:
    """Return a record for JSON, without its long lists."""
    return attrs.asdict(record, filter=lambda attribute, _: attribute.name not in ("lengths", "tokens"))


if __name__ == "__main__":
    cyclopts.run(main)

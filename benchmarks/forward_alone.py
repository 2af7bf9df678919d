"""The forward pass alone: what a benchmark's rates and latencies are divided by."""

from collections.abc import Callable
from itertools import product
from typing import Any

from attrs import define, field

from benchmarks.offline import Offline, OfflineJob, OfflineResult, thread_counts
from benchmarks.report import print_table
from benchmarks.rounds import Rounds

PAUSE_S = 0.003
"""Between passes, as a lone client leaves them; cores and caches are cold then."""

ROWS = (1, 8, 32, 64)


@define
class ForwardAlone:
    """The pass that the server computes, in a process without a server, measured in turns with what is divided by it.

    ``measure`` is called once a round, while no server has requests.
    """

    offline: Offline
    seconds: float
    tokens: int
    least_cosine: float
    passes: Rounds[tuple[int, int, float]] = field(factory=Rounds[tuple[int, int, float]])
    """By threads, rows and the pause after each pass, s."""

    steps = len(ROWS) * len(thread_counts()) * 2
    """Measurements of a round."""

    async def measure(self, step: Callable[[str], None]) -> None:
        """Measure everything once; ``step`` is called with a description of each measurement."""
        for threads, rows, pause_s in product(thread_counts(), ROWS, (0.0, PAUSE_S)):
            step(f"forward pass alone, {threads} threads, {rows} rows")
            job = OfflineJob(
                threads=threads,
                batch=rows,
                tokens=self.tokens,
                seconds=self.seconds,
                pause_s=pause_s,
                least_cosine=self.least_cosine,
            )
            self.passes.add((threads, rows, pause_s), await self.offline.measure(job))

    def rounds(self, rows: int, pause_s: float = 0.0) -> list[OfflineResult]:
        """Return the rounds on all cores."""
        return self.passes.results[thread_counts()[-1], rows, pause_s]

    def show(self) -> None:
        """Print the table."""
        columns = ["threads, pause between passes", *(f"{rows} rows: rows/s, ms" for rows in ROWS)]
        rate: Callable[..., str] = lambda *key: (  # noqa: E731
            f"{self.passes.median(key, 'rows_per_s'):.0f}, {self.passes.median(key, 'p50_ms'):.2f}"
        )
        lines = [
            [f"{threads}, {1e3 * pause_s:.0f} ms", *(rate(threads, rows, pause_s) for rows in ROWS)]
            for threads, pause_s in product(thread_counts(), (0.0, PAUSE_S))
        ]
        print_table(f"the forward pass alone in the same run, by {self.rounds(1)[0].by}", columns, lines)

    def as_document(self) -> list[dict[str, Any]]:
        """Return everything for JSON."""
        return self.passes.as_document("threads", "rows", "pause_s")

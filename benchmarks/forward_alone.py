"""The forward pass alone: what a benchmark's rates and latencies are divided by."""

from collections.abc import Callable
from itertools import product
from typing import Any

from attrs import define, field

from benchmarks.offline import Offline, OfflineJob, OfflineResult, thread_counts
from benchmarks.rounds import Rounds

PAUSE_S = 0.003
"""Between passes, as a lone client leaves them; cores and caches are cold then."""

ROWS = (1, 8, 32, 64)

SHAPES = ((1, PAUSE_S), *((rows, 0.0) for rows in ROWS))
"""Rows of a batch, and the pause after it, s."""

COLUMNS = ("threads", "1 row after 3 ms: rows/s, ms, CPU ms", *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS))
"""Of ``ForwardAlone.lines``."""


@define
class ForwardAlone:
    """The pass that the server computes, in a process without a server.

    ``measure`` is called once a round, while no server has requests, in turns with the quantities divided by the pass.
    """

    offline: Offline
    seconds: float
    tokens: int
    least_cosine: float
    passes: Rounds[tuple[int, int, float]] = field(factory=Rounds[tuple[int, int, float]])
    """By threads, rows and pause."""

    steps = len(SHAPES) * len(thread_counts())
    """Measurements of a round."""

    async def measure(self, step: Callable[[str], None], name: str = "forward pass alone") -> None:
        """Measure everything once; ``step`` is called with a description of each measurement."""
        for threads, (rows, pause_s) in product(thread_counts(), SHAPES):
            step(f"{name}, {threads} threads, {rows} rows")
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

    def lines(self) -> list[list[str]]:
        """Return the lines of a table, one for each number of threads."""
        median = self.passes.median
        return [
            [f"{threads}"]
            + [
                f"{median(key, 'rows_per_s'):.0f}, {median(key, 'p50_ms'):.2f}, {median(key, 'cpu_ms'):.2f}"
                for key in [(threads, *shape) for shape in SHAPES]
            ]
            for threads in thread_counts()
        ]

    def as_document(self) -> list[dict[str, Any]]:
        """Return everything for JSON."""
        return self.passes.as_document("threads", "rows", "pause_s")

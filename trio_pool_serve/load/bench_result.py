"""Results of servers: quantities, ratios, tables on the terminal, and the document of ``--json``."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from trio_pool_serve.load.bench_options import LoadOptions, RequestOptions
from trio_pool_serve.load.load_run import ANSWERED, quantile

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


@frozen(kw_only=True)
class Round:
    """One run of a load. ``latencies_ms`` are sorted, of requests answered with 200.

    ``tokens`` is the sum of the usage in responses; ``None`` if any response has none.
    """

    seconds: float
    requests_per_s: float
    latencies_ms: list[float]
    outcomes: Mapping[str, int]
    reasons: Mapping[str, str]
    late_p99_ms: float
    tokens: int | None
    unfinished: int = 0
    """Requests without a response when the run was stopped."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the answered requests per second."""
        if self.tokens is None or not self.latencies_ms:
            return None
        return self.requests_per_s * self.tokens / len(self.latencies_ms)


@frozen(kw_only=True)
class ServerResult:
    """All rounds with one server."""

    url: str
    rounds: Sequence[Round]
    texts_per_request: int

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests ended in each way."""
        return sum((Counter(each.outcomes) for each in self.rounds), Counter())

    @property
    def reasons(self) -> dict[str, str]:
        """The first error message of each outcome."""
        return {name: text for each in reversed(self.rounds) for name, text in each.reasons.items()}

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200."""
        return self.outcomes.total() - self.outcomes[ANSWERED]

    @property
    def latencies_ms(self) -> list[float]:
        """Latencies of all rounds, sorted."""
        return sorted(latency for each in self.rounds for latency in each.latencies_ms)

    @property
    def requests_per_s(self) -> float:
        """Requests answered with 200 per second: the median of the rounds."""
        return median(each.requests_per_s for each in self.rounds)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second: the median of the rounds in which every response has a usage."""
        known = [each.tokens_per_s for each in self.rounds if each.tokens_per_s is not None]
        return median(known) if known else None

    @property
    def late_p99_ms(self) -> float:
        """How much later than planned requests began: the p99 of the worst round."""
        return max(each.late_p99_ms for each in self.rounds)

    @property
    def unfinished(self) -> int:
        """Requests without a response when the run was stopped."""
        return sum(each.unfinished for each in self.rounds)


COMPARED: Mapping[str, Callable[[Round], float]] = {
    "requests/s": lambda measured: measured.requests_per_s,
    "p50": lambda measured: quantile(measured.latencies_ms, SHARES["p50"]),
    "p99": lambda measured: quantile(measured.latencies_ms, SHARES["p99"]),
}
"""The quantities of a round of which ratios are shown."""


def ratios(result: ServerResult, base: ServerResult) -> dict[str, float]:
    """Return quantities of a server divided by the same quantities of another: the medians of each round's ratio."""
    both = zip(result.rounds, base.rounds, strict=False)
    pairs = [(ours, theirs) for ours, theirs in both if ours.latencies_ms and theirs.latencies_ms]
    if not pairs:
        return {}
    return {name: median(of(ours) / of(theirs) for ours, theirs in pairs) for name, of in COMPARED.items()}


def histogram(latencies: Sequence[float], buckets: int) -> list[tuple[float, float, int]]:
    """Return buckets from the least to the greatest latency, each wider than the last by the same factor.

    A bucket is its lower bound, its upper bound and the number of latencies in it. ``latencies`` are sorted and
    positive.
    """
    if latencies[0] == latencies[-1]:
        return [(latencies[0], latencies[0], len(latencies))]
    counts, bounds = np.histogram(latencies, np.geomspace(latencies[0], latencies[-1], buckets + 1))
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), counts.tolist(), strict=True))


BUCKETS = 14
BAR = 40
"""Width of the longest bar, in characters."""

LATE_MS = 5.0
"""A longer delay of the generator itself is shown."""


def print_results(results: Sequence[ServerResult], console: Console) -> None:
    """Print the results of each server, and the ratios of several."""
    for result in results:
        console.print(Text(result.url, style="bold"), soft_wrap=True)
        facts = Table.grid(padding=(0, 2))
        for name, value in _facts(result):
            facts.add_row(name, Text(value))  # as Text: servers' messages may look like markup
        console.print(facts)
        if result.latencies_ms:
            console.print(_histogram_table(result))
    if len(results) > 1:
        console.print(_ratio_table(results))


def _facts(result: ServerResult) -> Iterator[tuple[str, str]]:
    yield "answered", f"{result.outcomes[ANSWERED]} of {result.outcomes.total()} requests"
    speed = f"{result.requests_per_s:.1f} requests/s"
    if result.texts_per_request > 1:
        speed += f", {result.requests_per_s * result.texts_per_request:.1f} texts/s"
    if result.tokens_per_s is not None:
        speed += f", {result.tokens_per_s:.0f} tokens/s"
    yield "throughput", speed
    latencies = result.latencies_ms
    if latencies:
        mean = sum(latencies) / len(latencies)
        quantiles = [f"{name} {quantile(latencies, share):.1f}" for name, share in SHARES.items()]
        yield "latency, ms", ", ".join([f"mean {mean:.1f}", *quantiles])
    for name, count in result.outcomes.most_common():
        if name != ANSWERED:
            reason = " ".join(result.reasons.get(name, "").split())
            yield "failed", f"{count} × {name}" + (f": {reason}" if reason else "")
    if result.unfinished:
        yield "unfinished", f"{result.unfinished} requests"
    if result.late_p99_ms > LATE_MS:
        yield "note", f"the load generator itself began requests up to {result.late_p99_ms:.0f} ms late (p99)"


def _histogram_table(result: ServerResult) -> Table:
    table = Table(Column("ms", justify="right"), Column("requests", justify="right"), "", box=None)
    buckets = histogram(result.latencies_ms, BUCKETS)
    most = max(count for _, _, count in buckets)
    for low, high, count in buckets:
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        table.add_row(f"{low:.1f} to {high:.1f}", str(count), bar)
    return table


def _ratio_table(results: Sequence[ServerResult]) -> Table:
    table = Table("÷ the first, medians of rounds", *COMPARED)
    for result in results[1:]:
        found = ratios(result, results[0])
        table.add_row(Text(result.url), *(f"{found[name]:.2f}" if found else "–" for name in COMPARED))
    return table


def as_document(results: Sequence[ServerResult], load: LoadOptions, requests: RequestOptions) -> dict[str, Any]:
    """Return the results and settings for JSON by msgspec, which writes NaN as null, without the API key."""
    return {
        "settings": asdict(load) | asdict(requests, filter=lambda attribute, _: attribute.name != "api_key"),
        "servers": [
            {
                "url": result.url,
                "requests_per_s": result.requests_per_s,
                "texts_per_s": result.requests_per_s * result.texts_per_request,
                "tokens_per_s": result.tokens_per_s,
                "latency_ms": {name: quantile(result.latencies_ms, share) for name, share in SHARES.items()},
                "outcomes": dict(result.outcomes),
                "reasons": result.reasons,
                "unfinished": result.unfinished,
                "late_p99_ms": result.late_p99_ms,
                "ratios": ratios(result, results[0]) if result is not results[0] else None,
                "rounds": result.rounds,
            }
            for result in results
        ],
    }

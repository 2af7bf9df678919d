"""The results of ``trio-pool-serve bench`` for people and for programs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trio_pool_serve.load.bench_options import LoadOptions, RequestOptions
from trio_pool_serve.load.bench_result import SHARES, ServerResult, histogram, ratios
from trio_pool_serve.load.outcomes import ANSWERED, quantile_of_sorted

BUCKETS = 14
BAR = 40
"""Characters of the longest bar."""

LATE_MS = 5.0
"""From here on the generator's own delay is pointed out."""


def print_results(results: Sequence[ServerResult], console: Console) -> None:
    """Print what was measured of each server, and of several how they compare."""
    for result in results:
        console.print(Text(result.url, style="bold"), soft_wrap=True)
        facts = Table.grid(padding=(0, 2))
        for name, value in _facts(result):
            facts.add_row(name, Text(value))  # as Text: what servers say may look like markup
        console.print(facts)
        if result.latencies_ms:
            console.print(_histogram_table(result))
    if len(results) > 1:
        console.print(_ratio_table(results))


def _facts(result: ServerResult) -> Iterator[tuple[str, str]]:
    answered = result.outcomes[ANSWERED]
    yield "answered", f"{answered} of {result.outcomes.total()} requests"
    speed = f"{result.requests_per_s:.1f} requests/s"
    if result.texts_per_request > 1:
        speed += f", {result.requests_per_s * result.texts_per_request:.1f} texts/s"
    if result.tokens_per_s is not None:
        speed += f", {result.tokens_per_s:.0f} tokens/s"
    yield "throughput", speed
    latencies = result.latencies_ms
    if latencies:
        mean = sum(latencies) / len(latencies)
        quantiles = [f"{name} {quantile_of_sorted(latencies, share):.1f}" for name, share in SHARES.items()]
        yield "latency, ms", ", ".join([f"mean {mean:.1f}", *quantiles])
    for name, count in result.outcomes.most_common():
        if name != ANSWERED:
            reason = " ".join(result.reasons.get(name, "").split())
            yield "failed", f"{count} × {name}" + (f": {reason}" if reason else "")
    if result.unfinished:
        yield "unfinished", f"{result.unfinished} requests"
    if result.late_p99_ms > LATE_MS:
        yield "note", f"the generator itself began requests up to {result.late_p99_ms:.0f} ms late (p99)"


def _histogram_table(result: ServerResult) -> Table:
    table = Table("ms", "requests", "", box=None)
    for index in (0, 1):
        table.columns[index].justify = "right"
    buckets = histogram(result.latencies_ms, BUCKETS)
    most = max(count for _, _, count in buckets)
    for low, high, count in buckets:
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        table.add_row(f"{low:.1f} to {high:.1f}", str(count), bar)
    return table


def _ratio_table(results: Sequence[ServerResult]) -> Table:
    table = Table("÷ the first, medians of rounds", "requests/s", "p50", "p99")
    base = results[0]
    for result in results[1:]:
        found = ratios(result, base)
        cells = (found.get(name) for name in ("requests/s", "p50", "p99"))
        table.add_row(Text(result.url), *("–" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def as_document(results: Sequence[ServerResult], load: LoadOptions, requests: RequestOptions) -> dict[str, Any]:
    """Return the results and settings for JSON, without the API key."""
    settings = attrs.asdict(load) | attrs.asdict(requests, filter=lambda attribute, _: attribute.name != "api_key")
    return {
        "settings": {name: str(value) if hasattr(value, "parts") else value for name, value in settings.items()},
        "servers": [
            {
                "url": result.url,
                "requests_per_s": result.requests_per_s,
                "texts_per_s": result.requests_per_s * result.texts_per_request,
                "tokens_per_s": result.tokens_per_s,
                "latency_ms": {
                    name: _or_none(quantile_of_sorted(result.latencies_ms, share)) for name, share in SHARES.items()
                },
                "outcomes": dict(result.outcomes),
                "reasons": result.reasons,
                "unfinished": result.unfinished,
                "late_p99_ms": result.late_p99_ms,
                "ratios": ratios(result, results[0]) if result is not results[0] else None,
                "rounds": [attrs.asdict(each) for each in result.rounds],
            }
            for result in results
        ],
    }


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number

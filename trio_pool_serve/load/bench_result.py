"""What was measured of one server."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from attrs import frozen

from trio_pool_serve.load.outcomes import ANSWERED, quantile_of_sorted

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


@frozen(kw_only=True)
class Round:
    """One run of a load. Latencies are in milliseconds, sorted, of requests answered with 200.

    ``tokens`` are those that the responses count, ``None`` if they count none.
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

    def latency_ms(self, share: float) -> float:
        """Return the latency that ``share`` of the answered requests stayed within; NaN without any."""
        return quantile_of_sorted(self.latencies_ms, share)

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
        total: Counter[str] = Counter()
        for each in self.rounds:
            total.update(each.outcomes)
        return total

    @property
    def reasons(self) -> dict[str, str]:
        """What was the matter, by outcome: the first of its kind."""
        return {name: text for each in reversed(self.rounds) for name, text in each.reasons.items()}

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200."""
        return self.outcomes.total() - self.outcomes[ANSWERED]

    @property
    def latencies_ms(self) -> list[float]:
        """Those of all rounds, sorted."""
        return sorted(latency for each in self.rounds for latency in each.latencies_ms)

    @property
    def requests_per_s(self) -> float:
        """Requests answered with 200 per second: the median of the rounds."""
        return median(each.requests_per_s for each in self.rounds)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second: the median of the rounds that know it."""
        known = [each.tokens_per_s for each in self.rounds if each.tokens_per_s is not None]
        return median(known) if known else None

    @property
    def late_p99_ms(self) -> float:
        """How much later than planned requests began in this process: the worst round's p99."""
        return max(each.late_p99_ms for each in self.rounds)

    @property
    def unfinished(self) -> int:
        """Requests without a response when the run was stopped."""
        return sum(each.unfinished for each in self.rounds)


def ratios(result: ServerResult, base: ServerResult) -> dict[str, float]:
    """Return quantities of a server divided by those of another: the medians of each round's ratio."""
    pairs = [(ours, theirs) for ours, theirs in zip(result.rounds, base.rounds, strict=False)]
    pairs = [(ours, theirs) for ours, theirs in pairs if ours.latencies_ms and theirs.latencies_ms]
    if not pairs:
        return {}
    found = {"requests/s": median(ours.requests_per_s / theirs.requests_per_s for ours, theirs in pairs)}
    for name in ("p50", "p99"):
        share = SHARES[name]
        found[name] = median(ours.latency_ms(share) / theirs.latency_ms(share) for ours, theirs in pairs)
    return found


def histogram(latencies: Sequence[float], buckets: int) -> list[tuple[float, float, int]]:
    """Return buckets from the least to the greatest latency, each wider than the last by the same factor.

    Each is its lower bound, its upper bound and the number of latencies in it; ``latencies`` are sorted and positive.
    """
    if not latencies:
        return []
    least, greatest = max(latencies[0], 1e-3), latencies[-1]
    if greatest <= least:
        return [(least, least, len(latencies))]
    factor = (greatest / least) ** (1 / buckets)
    bounds = [least * factor**index for index in range(buckets)] + [greatest]
    counts = [0] * buckets
    bucket = 0
    for latency in latencies:
        while bucket < buckets - 1 and latency >= bounds[bucket + 1]:
            bucket += 1
        counts[bucket] += 1
    return [(bounds[index], bounds[index + 1], counts[index]) for index in range(buckets)]

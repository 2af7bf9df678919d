"""What happened in the whole server between two snapshots: rates, quantiles and states, for people who watch it."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import Factory, define, frozen

from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family, Snapshot, merged_load

STAGES = ("render_wait", "render", "queue", "forward", "copy_wait", "encode", "request")
"""Histograms of seconds, in the order in which a request passes them; the last is a whole request."""

LOOP_LAG = "loop_lag"

HISTOGRAMS = (*(f"{stage}_seconds" for stage in (*STAGES, LOOP_LAG)), "batch_rows", "batch_tokens", "padding_waste")

COUNTERS = ("requests", "request_failures", "tokens", "busy_seconds", "connections_refused")

REFUSALS = "refusals"
"""A counter by reason, which is the label ``of``."""

GAUGES = ("connections",)


@define(eq=False)
class _Histogram:
    """A cumulative histogram of all processes and models together."""

    buckets: dict[float, float] = Factory(dict)
    """Observations up to each bound."""
    count: float = 0.0
    total: float = 0.0

    def since(self, before: "_Histogram") -> "_Histogram":
        """Return what was observed later. Numbers fall when a process ends; then nothing is said to have happened."""
        buckets = {bound: max(0.0, count - before.buckets.get(bound, 0.0)) for bound, count in self.buckets.items()}
        return _Histogram(buckets, max(0.0, self.count - before.count), max(0.0, self.total - before.total))

    def quantile(self, share: float) -> float | None:
        """Return a quantile as Prometheus' ``histogram_quantile`` does: linear within a bucket; ``None`` of nothing."""
        bounds = sorted(self.buckets)
        if not bounds or not self.buckets[bounds[-1]]:
            return None
        rank, below, lower = share * self.buckets[bounds[-1]], 0.0, 0.0
        for bound in bounds:
            here = self.buckets[bound]
            if here >= rank and here > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (here - below)
            below, lower = here, lower if math.isinf(bound) else bound
        return lower

    @property
    def mean(self) -> float | None:
        """The mean of what was observed, ``None`` of nothing."""
        return self.total / self.count if self.count else None


@frozen(eq=False)
class Totals:
    """The counters and histograms of all processes at one moment, and their load."""

    monotonic_s: float
    counters: Mapping[str, float]
    refusals: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, _Histogram]
    load: Mapping[str, Any]

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], monotonic_s: float) -> "Totals":
        """Add up the snapshots of the processes."""
        counters = dict.fromkeys(COUNTERS, 0.0)
        refusals: dict[str, float] = {}
        gauges = dict.fromkeys(GAUGES, 0.0)
        histograms = {name: _Histogram() for name in HISTOGRAMS}
        for family in _families(snapshots):
            name = family.name.removeprefix(PREFIX)
            if name in histograms:
                _add(histograms[name], family)
            elif name in counters:
                counters[name] += sum(value for sample, _, value in family.samples if sample.endswith("_total"))
            elif name == REFUSALS:
                for sample, labels, value in family.samples:
                    if sample.endswith("_total"):
                        refusals[labels["of"]] = refusals.get(labels["of"], 0.0) + value
            elif name in gauges:
                gauges[name] += sum(value for _, labels, value in family.samples if labels.get("of") == "open")
        return cls(monotonic_s, counters, refusals, gauges, histograms, merged_load(snapshots))


def _families(snapshots: Iterable[Snapshot]) -> Iterable[Family]:
    return (family for snapshot in snapshots for family in snapshot.families)


def _add(histogram: _Histogram, family: Family) -> None:
    for sample, labels, value in family.samples:
        if sample.endswith("_bucket"):
            bound = float(labels["le"])
            histogram.buckets[bound] = histogram.buckets.get(bound, 0.0) + value
        elif sample.endswith("_count"):
            histogram.count += value
        elif sample.endswith("_sum"):
            histogram.total += value


def sample_between(before: Totals | None, now: Totals, *, number: int, state: str) -> bytes:
    """Return one sample as JSON. Without ``before``, what needs a past is null.

    Durations are seconds, rates are per second, shares are from 0 to 1.
    """
    elapsed = now.monotonic_s - before.monotonic_s if before is not None else math.inf
    models = now.load.get("models", {})
    sample: dict[str, Any] = {
        "number": number,
        "state": state,
        "connections": now.gauges["connections"],
        "running": now.load.get("server_load", 0),
        "queued_rows": _sum_over(models, "queued_rows"),
        "queued_tokens": _sum_over(models, "queued_tokens"),
        "models": models,
        "processes": now.load.get("processes", {}),
        "memory": {
            "requests": now.load.get("request_memory_bytes", 0),
            "images": now.load.get("media_cache", {}).get("bytes", 0),
        },
    }
    if before is not None:
        rates = {name: max(0.0, now.counters[name] - before.counters[name]) / elapsed for name in COUNTERS}
        passed = {name: now.histograms[name].since(before.histograms[name]) for name in HISTOGRAMS}
        stages = {stage: passed[f"{stage}_seconds"] for stage in STAGES}
        lag = passed[f"{LOOP_LAG}_seconds"]
        budget = max((model.get("batch_token_budget", 0) for model in models.values()), default=0)
        tokens_per_batch = passed["batch_tokens"].mean
        sample |= {
            "requests": rates["requests"],
            "failures": rates["request_failures"],
            "connections_refused": rates["connections_refused"],
            "tokens": rates["tokens"],
            "busy": rates["busy_seconds"],
            "refusals": {
                reason: max(0.0, count - before.refusals.get(reason, 0.0)) / elapsed
                for reason, count in now.refusals.items()
            },
            "stages": {stage: [each.quantile(0.5), each.quantile(0.99)] for stage, each in stages.items()},
            "loop_lag": [lag.quantile(0.5), lag.quantile(0.99)],
            "batches": passed["batch_rows"].count / elapsed,
            "batch_rows": passed["batch_rows"].mean,
            "batch_tokens": tokens_per_batch,
            "batch_fill": tokens_per_batch / budget if tokens_per_batch is not None and budget else None,
            "padding": passed["padding_waste"].mean,
        }
    return msgspec.json.encode({"time": round(time.time(), 2), **_rounded(sample)})


def _sum_over(models: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return float(sum(model.get(name, 0) for model in models.values()))


def _rounded(value: Any) -> Any:
    """Return numbers with four digits, which is more than a picture shows: a history of 15 minutes is sent whole."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value

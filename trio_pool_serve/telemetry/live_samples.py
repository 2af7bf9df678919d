"""What happened in the whole server between two snapshots: rates, quantiles and states, for people who watch it."""

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import Factory, define, frozen

from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family, Snapshot, merged_load

STAGES = ("render_wait", "render", "queue", "forward", "copy_wait", "encode", "request")
"""Histograms of seconds, in the order in which a request passes them; the last is a whole request."""

LOOP_LAG = "loop_lag"

BATCH_TOKENS = "batch_tokens"

HISTOGRAMS = (*(f"{stage}_seconds" for stage in (*STAGES, LOOP_LAG)), "batch_rows", BATCH_TOKENS, "padding_waste")

COUNTERS = ("requests", "request_failures", "tokens", "busy_seconds", "connections_refused")

REFUSALS = "refusals"
"""A counter by reason, which is the label ``of``."""

CONNECTIONS = f"{PREFIX}connections"


@define(eq=False)
class _Histogram:
    """A histogram, of which each bucket has the observations up to its bound."""

    buckets: dict[float, float] = Factory(dict)
    """Observations up to each bound."""
    count: float = 0.0
    total: float = 0.0

    def take(self, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> None:
        """Add samples of a histogram in a snapshot."""
        for sample, labels, value in samples:
            if sample.endswith("_bucket"):
                bound = float(labels["le"])
                self.buckets[bound] = self.buckets.get(bound, 0.0) + value
            elif sample.endswith("_count"):
                self.count += value
            elif sample.endswith("_sum"):
                self.total += value

    def add(self, other: "_Histogram") -> None:
        """Add the observations of another histogram with the same bounds."""
        for bound, count in other.buckets.items():
            self.buckets[bound] = self.buckets.get(bound, 0.0) + count
        self.count += other.count
        self.total += other.total

    def since(self, before: "_Histogram") -> "_Histogram":
        """Return what was observed later than ``before``."""
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


@define(eq=False)
class _Counted:
    """What has been counted since the start of one process, or between two snapshots of all of them."""

    counters: dict[str, float] = Factory(lambda: dict.fromkeys(COUNTERS, 0.0))
    refusals: dict[str, float] = Factory(dict)
    histograms: dict[str, _Histogram] = Factory(lambda: {name: _Histogram() for name in HISTOGRAMS})
    batches: dict[str, _Histogram] = Factory(dict)
    """Tokens per batch by model."""

    def take(self, family: Family) -> None:
        """Add a metric of a snapshot, if it is one of these."""
        name = family.name.removeprefix(PREFIX)
        if name in self.histograms:
            self.histograms[name].take(family.samples)
        if name == BATCH_TOKENS:
            for each in family.samples:
                self.batches.setdefault(each[1].get("model", ""), _Histogram()).take([each])
        for sample, labels, value in family.samples:
            if name in self.counters and sample.endswith("_total"):
                self.counters[name] += value
            elif name == REFUSALS and sample.endswith("_total"):
                self.refusals[labels["of"]] = self.refusals.get(labels["of"], 0.0) + value

    def add_since(self, now: "_Counted", before: "_Counted") -> None:
        """Add what ``now`` has beyond ``before``, both of the same process."""
        for name in self.counters:
            self.counters[name] += max(0.0, now.counters[name] - before.counters[name])
        for reason, count in now.refusals.items():
            more = max(0.0, count - before.refusals.get(reason, 0.0))
            self.refusals[reason] = self.refusals.get(reason, 0.0) + more
        for name, histogram in self.histograms.items():
            histogram.add(now.histograms[name].since(before.histograms[name]))
        for model, tokens in now.batches.items():
            more_of = tokens.since(before.batches.get(model, _Histogram()))
            self.batches.setdefault(model, _Histogram()).add(more_of)


@frozen(eq=False)
class Totals:
    """What all processes have counted until one moment, each by itself, and their load."""

    monotonic_s: float
    processes: Mapping[Hashable, _Counted]
    connections: float
    load: Mapping[str, Any]

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], monotonic_s: float) -> "Totals":
        """Read the snapshots of the processes."""
        processes: dict[Hashable, _Counted] = {}
        connections = 0.0
        for snapshot in snapshots:
            counted = processes.setdefault(_identity(snapshot), _Counted())
            for family in snapshot.families:
                counted.take(family)
                if family.name == CONNECTIONS:
                    connections += sum(value for _, labels, value in family.samples if labels.get("of") == "open")
        return cls(monotonic_s, processes, connections, merged_load(snapshots))

    def since(self, before: "Totals") -> _Counted:
        """Return what was counted later than ``before``, by the processes that are in both.

        A process that has just been started, or did not answer in time, is left out: what it has counted since its
        start is not what has happened in this second.
        """
        passed = _Counted()
        for identity, counted in self.processes.items():
            if identity in before.processes:
                passed.add_since(counted, before.processes[identity])
        return passed


def _identity(snapshot: Snapshot) -> Hashable:
    """Return what tells one process from its successor."""
    processes = snapshot.load.get("processes", {})
    return tuple(sorted((name, process["pid"]) for name, process in processes.items() if "pid" in process))


def _cpu_shares(before: Totals, now: Totals) -> dict[str, float]:
    """Return how many cores each process has used since ``before``."""
    shares = {}
    for name, process in now.load.get("processes", {}).items():
        old = before.load.get("processes", {}).get(name, {})
        if "pid" in process and process["pid"] == old.get("pid"):
            shares[name] = (process["cpu_seconds"] - old["cpu_seconds"]) / (now.monotonic_s - before.monotonic_s)
    return shares


def sample_between(before: Totals | None, now: Totals, *, number: int, state: str) -> bytes:
    """Return one sample as JSON. Without ``before``, what needs a past is null.

    Durations are seconds, rates are per second, shares are from 0 to 1.
    """
    models = now.load.get("models", {})
    shares = {} if before is None else _cpu_shares(before, now)
    processes = {
        name: {key: value for key, value in process.items() if key != "cpu_seconds"}
        | ({"cpu": shares[name]} if name in shares else {})
        for name, process in now.load.get("processes", {}).items()
    }
    sample: dict[str, Any] = {
        "number": number,
        "state": state,
        "connections": now.connections,
        "running": now.load.get("server_load", 0),
        "queued_rows": _sum_over(models, "queued_rows"),
        "queued_tokens": _sum_over(models, "queued_tokens"),
        "models": models,
        "processes": processes,
        "memory": {
            "requests": now.load.get("request_memory_bytes", 0),
            "images": now.load.get("media_cache", {}).get("bytes", 0),
        },
    }
    if before is not None:
        elapsed, passed = now.monotonic_s - before.monotonic_s, now.since(before)
        stages = {stage: passed.histograms[f"{stage}_seconds"] for stage in STAGES}
        lag = passed.histograms[f"{LOOP_LAG}_seconds"]
        rates = {name: count / elapsed for name, count in passed.counters.items()}
        sample |= {
            "requests": rates["requests"],
            "failures": rates["request_failures"],
            "connections_refused": rates["connections_refused"],
            "tokens": rates["tokens"],
            "busy": rates["busy_seconds"],
            "refusals": {reason: count / elapsed for reason, count in passed.refusals.items()},
            "stages": {stage: [each.quantile(0.5), each.quantile(0.99)] for stage, each in stages.items()},
            "loop_lag": [lag.quantile(0.5), lag.quantile(0.99)],
            "batches": passed.histograms["batch_rows"].count / elapsed,
            "batch_rows": passed.histograms["batch_rows"].mean,
            "batch_tokens": passed.histograms[BATCH_TOKENS].mean,
            "batch_fill": _fill(passed.batches, models),
            "padding": passed.histograms["padding_waste"].mean,
        }
    return msgspec.json.encode({"time": round(time.time(), 2), **_rounded(sample)})


def _fill(batches: Mapping[str, _Histogram], models: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean share of its model's budget that a batch has used; ``None`` without a batch."""
    budgets = {model: float(models.get(model, {}).get("batch_token_budget", 0)) for model in batches}
    known = {model: tokens for model, tokens in batches.items() if tokens.count and budgets[model]}
    if not known:
        return None
    full = sum(tokens.total / budgets[model] for model, tokens in known.items())
    return full / sum(tokens.count for tokens in known.values())


def _sum_over(models: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return float(sum(model.get(name, 0) for model in models.values()))


def _rounded(value: Any) -> Any:
    """Return numbers with four digits, which is more than a picture shows: a history of 15 minutes is sent whole."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value

"""Samples of the whole server for people who watch it: rates, quantiles and states, one a second for 15 minutes."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec
import trio
from attrs import define, field, frozen

from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family, Snapshot, merged_load

STAGES = ("render_wait", "render", "queue", "forward", "copy_wait", "encode", "request")
"""Histograms of seconds in the order in which a request passes them; the last is the whole request."""

BATCH_TOKENS = "batch_tokens"

HISTOGRAMS = (*(f"{stage}_seconds" for stage in (*STAGES, "loop_lag")), "batch_rows", BATCH_TOKENS, "padding_waste")

COUNTERS: Mapping[str, str] = {
    "requests": "requests",
    "failures": "request_failures",
    "connections_refused": "connections_refused",
    "tokens": "tokens",
    "busy": "busy_seconds",
}
"""Counters by the names of their rates in a sample."""

REFUSALS = "refusals"
"""A counter by reason, the label ``of``."""

EVERY_S = 1.0

KEPT = 900
"""Samples that are kept: fifteen minutes."""

AT_ONCE = 32
"""Samples that are sent to a viewer at once: a slow reader keeps no more of them in memory."""

STALE_S = 3 * EVERY_S
"""Snapshots further apart are not compared: the rates would be means over an unwatched time."""

Counted: TypeAlias = defaultdict[tuple[str, str, float], float]
"""The counts of a process since its start, or of all processes between two snapshots.

The keys are the sample's name with Prometheus' suffix, the label that is kept (a refusal's reason, a batch's model,
otherwise empty), and the bound of a histogram's bucket (otherwise 0).
"""


def _count(counted: Counted, family: Family) -> None:
    """Add a metric of a snapshot, if samples contain it."""
    name = family.name.removeprefix(PREFIX)
    if name not in (*COUNTERS.values(), *HISTOGRAMS, REFUSALS):
        return
    kept = {REFUSALS: "of", BATCH_TOKENS: "model"}.get(name, "")
    for sample, labels, value in family.samples:
        if not sample.endswith("_created"):
            counted[sample.removeprefix(PREFIX), labels.get(kept, ""), float(labels.get("le", 0))] += value


def _by_label(counted: Counted, name: str) -> dict[str, float]:
    """Return the counts of one name by label."""
    return {label: count for (each, label, _), count in counted.items() if each == name}


def _sum_of(counted: Counted, name: str) -> float:
    return sum(_by_label(counted, name).values())


def _mean(counted: Counted, name: str) -> float | None:
    """Return the mean of a histogram's observations, ``None`` if there are none."""
    count = _sum_of(counted, f"{name}_count")
    return _sum_of(counted, f"{name}_sum") / count if count else None


def quantile(counted: Counted, name: str, share: float) -> float | None:
    """Return a quantile as Prometheus' ``histogram_quantile``: linear in a bucket; ``None`` without observations."""
    buckets: defaultdict[float, float] = defaultdict(float)
    for (each, _, bound), count in counted.items():
        if each == f"{name}_bucket":
            buckets[bound] += count
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank, below, lower = share * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        here = buckets[bound]
        if here >= rank and here > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (here - below)
        below, lower = here, lower if math.isinf(bound) else bound
    return lower


@frozen(eq=False)
class Totals:
    """The counts of each process up to one moment, and their load."""

    monotonic_s: float
    processes: Mapping[Hashable, Counted]
    connections: float
    load: Mapping[str, Any]

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], monotonic_s: float) -> "Totals":
        """Return the totals of the processes' snapshots."""
        processes: defaultdict[Hashable, Counted] = defaultdict(lambda: defaultdict(float))
        connections = 0.0
        for snapshot in snapshots:
            counted = processes[_identity(snapshot)]
            for family in snapshot.families:
                _count(counted, family)
                if family.name == f"{PREFIX}connections":
                    connections += sum(value for _, labels, value in family.samples if labels.get("of") == "open")
        return cls(monotonic_s, processes, connections, merged_load(snapshots))

    def since(self, before: "Totals") -> Counted:
        """Return the counts since ``before`` of the processes that are in both.

        A process that was started meanwhile, or did not answer in time, is left out: its counts since its start are not
        the counts of this second.
        """
        passed: Counted = defaultdict(float)
        for identity in self.processes.keys() & before.processes.keys():
            for key, count in self.processes[identity].items():
                passed[key] += max(0.0, count - before.processes[identity].get(key, 0.0))
        return passed


def _identity(snapshot: Snapshot) -> Hashable:
    """Return the names and ids of a snapshot's processes, which tell a process from its successor."""
    processes = snapshot.load.get("processes", {})
    return tuple(sorted((name, process["pid"]) for name, process in processes.items() if "pid" in process))


def _cpu_shares(before: Totals, now: Totals) -> dict[str, float]:
    """Return the number of cores that each process has used since ``before``."""
    shares = {}
    for name, process in now.load.get("processes", {}).items():
        old = before.load.get("processes", {}).get(name, {})
        if "pid" in process and process["pid"] == old.get("pid"):
            shares[name] = (process["cpu_seconds"] - old["cpu_seconds"]) / (now.monotonic_s - before.monotonic_s)
    return shares


def sample_between(before: Totals | None, now: Totals, *, number: int, state: str) -> bytes:
    """Return one sample as JSON, without rates if there is no ``before``.

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
        sample |= {rate: _sum_of(passed, f"{name}_total") / elapsed for rate, name in COUNTERS.items()}
        sample |= {
            "refusals": {reason: count / elapsed for reason, count in _by_label(passed, f"{REFUSALS}_total").items()},
            "stages": {stage: _median_and_p99(passed, stage) for stage in STAGES},
            "loop_lag": _median_and_p99(passed, "loop_lag"),
            "batches": _sum_of(passed, "batch_rows_count") / elapsed,
            "batch_rows": _mean(passed, "batch_rows"),
            "batch_tokens": _mean(passed, BATCH_TOKENS),
            "batch_fill": _fill(passed, models),
            "padding": _mean(passed, "padding_waste"),
        }
    return msgspec.json.encode({"time": round(time.time(), 2), **_rounded(sample)})


def _median_and_p99(passed: Counted, stage: str) -> list[float | None]:
    return [quantile(passed, f"{stage}_seconds", share) for share in (0.5, 0.99)]


def _fill(passed: Counted, models: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean share of its model's token budget that a batch used; ``None`` without batches."""
    batches, tokens = (_by_label(passed, f"{BATCH_TOKENS}_{suffix}") for suffix in ("count", "sum"))
    budgets = {model: float(models.get(model, {}).get("batch_token_budget", 0)) for model in batches}
    known = [model for model in batches if batches[model] and budgets[model]]
    if not known:
        return None
    return sum(tokens[model] / budgets[model] for model in known) / sum(batches[model] for model in known)


def _sum_over(models: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return float(sum(model.get(name, 0) for model in models.values()))


def _rounded(value: Any) -> Any:
    """Return numbers rounded to four digits, more than a chart shows: a whole history of 15 minutes is sent."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


@define(eq=False)
class LiveHistory:
    """Takes samples while viewers wait for them; without a viewer nothing runs.

    It has no task: one of the waiting viewers takes the next sample in its own task, for all of them. If that viewer
    leaves, another one takes over. Samples are kept as JSON, so each is encoded once for all viewers.

    ``take`` returns the snapshots of all processes, ``state`` the server's state.
    """

    take: Callable[[], Awaitable[Sequence[Snapshot]]]
    state: Callable[[], str]
    samples: deque[bytes] = field(init=False, factory=lambda: deque(maxlen=KEPT))
    taken: int = field(init=False, default=0)
    """Number of the last sample; the first is 1."""
    _due: float = field(init=False, default=0.0)
    _before: Totals | None = field(init=False, default=None)
    _turn: trio.Lock = field(init=False, factory=trio.Lock)

    async def samples_after(self, number: int) -> tuple[int, list[bytes]]:
        """Return the number of the last returned sample, and the kept samples after ``number``; wait if there is none.

        At most ``AT_ONCE`` are returned, the oldest first. A ``number`` that has not been reached is from before a
        restart of the server: then samples from the beginning are returned. Cancellation: at once; another viewer takes
        the sample.
        """
        if number > self.taken:
            number = 0
        if number == self.taken:
            await self._wait_for_sample(number)
        behind = min(self.taken - number, len(self.samples))
        begin = len(self.samples) - behind
        found = list(islice(self.samples, begin, begin + AT_ONCE))
        return self.taken - behind + len(found), found

    async def _wait_for_sample(self, number: int) -> None:
        async with self._turn:
            if self.taken > number:
                return  # another viewer has taken it
            await trio.sleep_until(self._due)
            totals = Totals.of(await self.take(), now := trio.current_time())
            before = self._before if self._before is not None and now - self._before.monotonic_s < STALE_S else None
            self.samples.append(sample_between(before, totals, number=self.taken + 1, state=self.state()))
            self.taken += 1
            self._before, self._due = totals, now + EVERY_S

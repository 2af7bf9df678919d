"""Prometheus metrics, one registry per server."""

import sys
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import trio
from attrs import define
from prometheus_client.core import CollectorRegistry, Counter, GaugeMetricFamily, Histogram, Metric
from prometheus_client.registry import Collector

from trio_pool_serve.errors import (
    DrainingError,
    EngineLoadingError,
    OverloadedError,
    StorageInUseError,
    UnavailableError,
)
from trio_pool_serve.processes.allocator import resident_bytes
from trio_pool_serve.processes.standard_error import StandardError
from trio_pool_serve.processes.worker_processes import WorkerStatistics
from trio_pool_serve.telemetry.gauges import GAUGES, Gauges
from trio_pool_serve.threads.client_turns import LimiterStatistics
from trio_pool_serve.threads.offload import LimiterName

PREFIX = "trio_pool_serve_"

BUSY = f"{PREFIX}busy_seconds"

STARTED = time.time()
"""Start of this process, after its first imports; seconds since the epoch."""

SECONDS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Bucket bounds: an embedding takes milliseconds, so they begin at a quarter of a millisecond."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TOKENS = tuple(16 * 4**n for n in range(8))
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

FAULTS = {
    "failed_batches": "batches that failed",
    "out_of_memory": "passes that ran out of device memory",
    "retries": "passes over parts of failed batches",
    "failed_rows": "rows that got an error",
}

REFUSALS = {
    "queue": "429: the request would wait longer than `--max-queue-s`, or past its deadline",
    "memory": "429: all requests, or its client's, have reached their limit of memory",
    "api_key": "429: its API key has reached a limit",
    "loading": "503: no engine of its model is ready",
    "draining": "503: the server is draining",
    "unavailable": "503: an engine, or another process that the request needs, has exited or is in use",
}


REASONS: Mapping[type, str] = {
    EngineLoadingError: "loading",
    DrainingError: "draining",
    UnavailableError: "unavailable",
    StorageInUseError: "unavailable",
}
"""The refusals other than 429, by their errors; a subclass of a listed error has its reason."""


class BatchHistogram(Histogram):
    """A histogram that gets many observations from one batch, and has no exemplars."""

    def observe(self, amount: float, exemplar: object = None, count: int = 1) -> None:  # noqa: ARG002
        """Observe ``count`` equal amounts."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe each amount. Equal amounts, of rows that arrived together for example, cost one observation."""
        for amount, count in Counts(amounts).items():
            self.observe(amount, count=count)


CHANGES: Mapping[str, str] = {
    "loads": "loaded models",
    "failed_loads": "models that failed to load while the server ran",
    "unloads": "unloaded models",
}
"""The meanings of the label ``of`` of the counter ``model_changes``."""


@define(eq=False)
class EngineMetrics:
    """The metrics of one model's engine: the server's metrics labelled with the model's name."""

    queue: BatchHistogram
    forward: Histogram
    copy_wait: Histogram
    batch_rows: Histogram
    batch_tokens: Histogram
    tokens: Counter
    busy: Counter
    padding_waste: Histogram
    faults: Mapping[str, Counter]
    """Counters by the names in ``FAULTS``."""
    add_gauges: Callable[[Callable[[], Gauges]], None]
    """Registers a function that returns gauges; it is called before each scrape."""


class Metrics(Collector):
    """All metrics of one server. Every series is present, at zero, before the first request.

    Gauges are computed from their sources' statistics at each scrape, instead of updated at each change.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sources: list[tuple[str | None, Callable[[], Gauges]]] = []
        """Sources of gauges, each with the model that labels its gauges, if any."""

        def seconds(name: str, what: str) -> Histogram:
            return BatchHistogram(f"{PREFIX}{name}_seconds", what, buckets=SECONDS, registry=self.registry)

        def by_model(name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> BatchHistogram:
            return BatchHistogram(PREFIX + name, what, labelnames=["model"], buckets=buckets, registry=self.registry)

        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, what, labelnames=labels, registry=self.registry)

        self.render_wait = seconds("render_wait", "Wait of a chunk of one request's prompts for a renderer thread")
        self.render = seconds("render", "Rendering of a chunk of one request's prompts")
        self.encode = seconds("encode", "Encoding of one response, including the wait for a thread")
        self.total = seconds(
            "request", "One request, from its first byte read to its encoded response, or to the end of its stream"
        )
        self._of_models: Mapping[str, Any] = {
            "queue": by_model("queue_seconds", "Wait of one row in the engine's queue"),
            "forward": by_model("forward_seconds", "Launch of one batch; on CPU, its whole forward pass"),
            "copy_wait": by_model("copy_wait_seconds", "Wait until one launched batch's outputs are on the host"),
            "batch_rows": by_model("batch_rows", "Rows per batch", ROWS),
            "batch_tokens": by_model("batch_tokens", "Tokens per batch, including padding", TOKENS),
            "tokens": count("tokens", "Tokens computed, without padding", "model"),
            "busy": count(BUSY.removeprefix(PREFIX), "Seconds with a batch in flight", "model"),
            "padding_waste": by_model("padding_waste", "Share of a batch's tokens that are padding", SHARES),
        }
        """Metrics by the fields of ``EngineMetrics``."""
        self._faults = count("faults", "Faults of batches, by kind", "model", "of")
        changes = count("model_changes", "Loads and unloads of models", "of")
        self.model_changes = {of: changes.labels(of) for of in CHANGES}
        self.loop_lag = seconds("loop_lag", "How late the event loop wakes a sleeping task")
        self.requests = count("requests", "Requests answered by a task route")
        self.failures = count("request_failures", "Requests of any route answered by an error")
        refusals = count("refusals", "Requests refused because of the server's state or limits, by reason", "of")
        self._refusals = {of: refusals.labels(of) for of in REFUSALS}
        self.connections_refused = count(
            "connections_refused",
            "Connections and HTTP/2 requests refused unread: above the limits, or because the event loop lags",
        )
        self.listener_restarts = count("listener_restarts", "Restarts of a crashed listener")
        self.registry.register(self)

    def of_engine(self, model: str) -> EngineMetrics:
        """Return the metrics of an engine for ``model``, which continue an earlier engine's, but not its gauges."""
        self._forget_gauges(model)
        return EngineMetrics(
            **{name: metric.labels(model) for name, metric in self._of_models.items()},
            faults={of: self._faults.labels(model, of) for of in FAULTS},
            add_gauges=partial(self.add_gauges, model=model),
        )

    def count_failure(self, error: Exception) -> None:
        """Count a request that is answered by an error; if it was refused, count that, too."""
        self.failures.inc()
        if isinstance(error, OverloadedError):
            self._refusals[error.reason].inc()
        elif reason := next((REASONS[base] for base in type(error).__mro__ if base in REASONS), None):
            self._refusals[reason].inc()

    def forget(self, model: str) -> None:
        """Remove the metrics of a model that is no longer served."""
        self._forget_gauges(model)
        for metric in self._of_models.values():
            metric.remove(model)
        for of in FAULTS:
            self._faults.remove(model, of)

    def _forget_gauges(self, model: str) -> None:
        self._sources = [(of, source) for of, source in self._sources if of != model]

    def add_gauges(self, source: Callable[[], Gauges], *, model: str | None = None) -> None:
        """Register ``source()``, which ``collect`` calls and which returns gauges named in ``GAUGES``.

        With ``model``, they are labelled with its name, until ``forget`` or its next engine.
        """
        self._sources.append((model, source))

    def observe_hop(self, kind: LimiterName, wait_s: float, run_s: float) -> None:
        """Observe one thread hop; the signature is that of ``Offload.observe``."""
        if kind == "render":
            self.render_wait.observe(wait_s)
            self.render.observe(run_s)

    def collect(self) -> Iterable[Metric]:
        """Return the gauges of all sources; the registry calls this. On the loop, which owns what they read."""
        families: dict[str, GaugeMetricFamily] = {}
        for model, source in self._sources:
            labels = ["of"] if model is None else ["model", "of"]
            for name, values in source().items():
                if name not in families:
                    families[name] = GaugeMetricFamily(PREFIX + name, GAUGES[name].text, labels=labels)
                for label, value in values.items():
                    families[name].add_metric([label] if model is None else [model, label], value)
        return families.values()


def process_gauges() -> Gauges:
    """Return this process's memory, start time, living tasks and dropped log lines. Call it on the loop.

    The number of tasks grows only if something leaks.
    """
    return {
        "tasks": {"living": trio.lowlevel.current_statistics().tasks_living},
        "process": {"count": 1.0, "start_time_seconds": STARTED, "resident_bytes": float(resident_bytes())},
        "log_lines": {"dropped": sys.stderr.dropped_lines if isinstance(sys.stderr, StandardError) else 0},
    }


def thread_gauges(limiters: Mapping[LimiterName, LimiterStatistics], workers: Mapping[str, WorkerStatistics]) -> Gauges:
    """Return the use of each thread limiter and each pool of worker processes."""
    uses = ("capacity", "borrowed", "waiting")
    return {
        **{f"limiter_{use}": {kind: getattr(limiter, use) for kind, limiter in limiters.items()} for use in uses},
        **{f"worker_{use}": {name: getattr(pool, use) for name, pool in workers.items()} for use in (*uses, "killed")},
    }


async def sample_loop_lag(histogram: Histogram, *, every_s: float = 0.1) -> NoReturn:
    """Observe, every ``every_s`` seconds forever, how many seconds late the loop wakes a sleeping task.

    Cancellation: at once; nothing is held.
    """
    while True:
        deadline = trio.current_time() + every_s
        await trio.sleep_until(deadline)
        histogram.observe(max(0.0, trio.current_time() - deadline))

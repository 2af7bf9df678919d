"""Generates the Grafana dashboard and the Prometheus alerts: ``python deploy/monitoring/generate.py``.

They are plain dicts: a panel needs ten fields. The builders that Grafana publishes for Python have a version for each
of Grafana's, of which none is required here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import field, frozen

from trio_pool_serve.telemetry.metrics import PREFIX

FOLDER = Path(__file__).parent

RUNBOOK = "docs/alerts.md"
"""Each section explains the alert of its name."""

Json = Mapping[str, Any]

# -- dashboard -------------------------------------------------------------------------------------------

ALL = 'job=~"$job"'
OF_MODEL = f'{ALL},model=~"$model"'
RATE = "[$__rate_interval]"


@frozen
class Query:
    """A PromQL expression, and the legend of its series."""

    expression: str
    legend: str


@frozen
class Panel:
    """A graph over time. ``unit`` is one of Grafana's."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    description: str = ""
    is_stacked: bool = field(default=False, kw_only=True)


def gauge(name: str, of: str, *, by: str = "", matchers: str = ALL) -> str:
    """Return the sum of a gauge, ``by`` labels if given; ``of`` is a regular expression."""
    grouping = f" by ({by})" if by else ""
    return f'sum{grouping} ({PREFIX}{name}{{{matchers},of=~"{of}"}})'


def rate(name: str, *, by: str = "", matchers: str = ALL) -> str:
    """Return how fast a counter grows per second."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({PREFIX}{name}{{{matchers}}}{RATE}))"


def quantiles(name: str, *, matchers: str = ALL, by: str = "", legend: str = "") -> list[Query]:
    """Return the median and the 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return [
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({PREFIX}{name}_bucket{{{matchers}}}{RATE})))",
            f"{legend}p{round(share * 100)}",
        )
        for share in (0.5, 0.99)
    ]


def mean(name: str, *, by: str = "model", matchers: str = OF_MODEL) -> str:
    """Return the mean of what a histogram has observed."""
    return f"{rate(f'{name}_sum', by=by, matchers=matchers)} / {rate(f'{name}_count', by=by, matchers=matchers)}"


def stage(title: str, name: str, description: str, *, of_model: bool = False) -> Panel:
    """Return the panel of a histogram of seconds."""
    if of_model:
        return Panel(title, quantiles(name, matchers=OF_MODEL, by="model", legend="{{model}} "), "s", description)
    return Panel(title, quantiles(name), "s", description)


def engine(of: str) -> str:
    """Return a gauge of engines, by model."""
    return gauge("engine", of, by="model", matchers=OF_MODEL)


PANELS: Mapping[str, Sequence[Panel]] = {
    "Requests": [
        Panel(
            "Requests/s",
            [
                Query(rate("requests_total"), "answered"),
                Query(rate("request_failures_total"), "answered with an error"),
            ],
            "reqps",
            "The second line also counts errors of routes that compute nothing.",
        ),
        Panel(
            "Refusals/s by reason",
            [
                Query(rate("refusals_total", by="of"), "{{of}}"),
                Query(rate("connections_refused_total"), "connections, unread"),
            ],
            "reqps",
            is_stacked=True,
        ),
        stage("Request", "request_seconds", "From the first byte read to the encoded response."),
    ],
    "Stages of a request": [
        stage(
            "Wait for a renderer",
            "render_wait_seconds",
            "Until a renderer is free for a chunk of a request's prompts.",
        ),
        stage("Rendering", "render_seconds", "Tokenising a chunk of one request's prompts."),
        stage("Queue", "queue_seconds", "Time of one row in the queue, until its batch is launched.", of_model=True),
        stage("Forward", "forward_seconds", "Launch of a batch; on CPU this includes its forward pass.", of_model=True),
        stage("Copy wait", "copy_wait_seconds", "Until a batch's outputs are on the host.", of_model=True),
        stage("Encoding", "encode_seconds", "Encoding a response, including the wait for a thread."),
    ],
    "Queue and batches": [
        Panel("Waiting rows", [Query(engine("queued_rows"), "{{model}}")]),
        Panel(
            "Waiting tokens",
            [
                Query(engine("queued_tokens"), "{{model}} in queues"),
                Query(engine("admitted_tokens"), "{{model}} admitted"),
            ],
        ),
        Panel(
            "Time for admitted work",
            [Query(f'max by (model) ({PREFIX}engine{{{OF_MODEL},of="waiting_seconds"}})', "{{model}}")],
            "s",
            "How long the admitted work takes, at the measured rates. Requests are refused above --max-queue-s.",
        ),
        Panel("Rows per batch", quantiles("batch_rows", matchers=OF_MODEL, by="model", legend="{{model}} ")),
        Panel(
            "Fill of batches",
            [
                Query(
                    f"{mean('batch_tokens')} / on (model) min by (model) "
                    f'({PREFIX}engine{{{OF_MODEL},of="batch_token_budget"}} > 0)',
                    "{{model}}",
                )
            ],
            "percentunit",
            "Mean tokens of a batch, including padding, divided by the current maximum.",
        ),
        Panel(
            "Padding",
            [
                Query(
                    f"1 - {rate('tokens_total', by='model', matchers=OF_MODEL)} / "
                    f"{rate('batch_tokens_sum', by='model', matchers=OF_MODEL)}",
                    "{{model}}",
                )
            ],
            "percentunit",
            "Share of the tokens of all batches.",
        ),
        Panel("Tokens/s", [Query(rate("tokens_total", by="model", matchers=OF_MODEL), "{{model}}")]),
    ],
    "Engines": [
        Panel(
            "State of engines",
            [Query(gauge("model", ".+", by="model, of", matchers=OF_MODEL), "{{model}} {{of}}")],
            description="API processes for which the model's engine is in this state.",
        ),
        Panel(
            "Replicas",
            [
                Query(engine("ready"), "{{model}} ready"),
                Query(engine("stalled"), "{{model}} stalled"),
                Query(gauge("replica", "failed", by="model", matchers=OF_MODEL), "{{model}} failed"),
            ],
        ),
        Panel(
            "Restarts of engine processes",
            [Query(gauge("replica", "restarts", by="model, replica", matchers=OF_MODEL), "{{model}} {{replica}}")],
            description="Since the server started.",
        ),
        Panel(
            "Busy",
            [Query(rate("busy_seconds_total", by="model", matchers=OF_MODEL), "{{model}}")],
            description="Engines that have a batch in flight, on average.",
        ),
        Panel(
            "Tokens/s of each replica",
            [Query(rate("replica_tokens_total", by="model, replica", matchers=OF_MODEL), "{{model}} {{replica}}")],
        ),
        Panel("Faults/s", [Query(rate("faults_total", by="model, of", matchers=OF_MODEL), "{{model}} {{of}}")]),
        Panel(
            "Links to engines on other machines",
            [
                Query(gauge("link", "connected", by="address"), "{{address}} connected"),
                Query(gauge("link", "losses", by="address"), "{{address}} losses"),
            ],
        ),
        Panel("Rows on other machines", [Query(gauge("link", "waiting_rows", by="address"), "{{address}}")]),
    ],
    "Processes": [
        stage("Loop lag", "loop_lag_seconds", "How late an event loop wakes its tasks."),
        Panel(
            "Connections",
            [
                Query(gauge("connections", "open", by="instance"), "{{instance}}"),
                Query(gauge("connections", "limit", by="instance"), "{{instance}} limit"),
            ],
        ),
        Panel(
            "Memory of processes",
            [Query(gauge("process", "resident_bytes", by="instance"), "{{instance}}")],
            "bytes",
            "Resident memory. Shared memory counts once per process.",
        ),
        Panel(
            "Memory of requests",
            [
                Query(gauge("request_memory_bytes", "all", by="instance"), "{{instance}}"),
                Query(gauge("request_memory_limit_bytes", "all", by="instance"), "{{instance}} limit"),
            ],
            "bytes",
        ),
        Panel(
            "Use of threads",
            [
                Query(
                    f"{gauge('limiter_borrowed', '.+', by='of')} / {gauge('limiter_capacity', '.+', by='of')}",
                    "{{of}}",
                )
            ],
            "percentunit",
        ),
        Panel("Waiting for a thread", [Query(gauge("limiter_waiting", ".+", by="of"), "{{of}}")]),
        Panel("Trio tasks", [Query(gauge("tasks", "living", by="instance"), "{{instance}}")]),
    ],
    "Batches, images and the cache of results": [
        Panel(
            "Batches of the Batch API",
            [Query(gauge("batches", "unfinished|waiting|computing", by="of"), "{{of}}")],
        ),
        Panel(
            "Lines/s of batches",
            [Query(f'sum (rate({PREFIX}batches{{{ALL},of="lines"}}{RATE}))', "lines")],
        ),
        Panel(
            "Images/s",
            [Query(f'sum by (of) (rate({PREFIX}media_cache{{{ALL},of=~"hits|misses"}}{RATE}))', "{{of}}")],
            description="Hits and misses of the cache.",
        ),
        Panel(
            "Rows/s from the cache of results",
            [Query(f'sum by (of) (rate({PREFIX}result_cache{{{ALL},of=~"hits|misses"}}{RATE}))', "{{of}}")],
            description="Hits and misses of the cache. Misses are computed.",
        ),
        Panel("Cache of results", [Query(gauge("result_cache", "bytes", by="instance"), "{{instance}}")], "bytes"),
        Panel("Cache of images", [Query(gauge("media_cache", "bytes", by="instance"), "{{instance}}")], "bytes"),
        Panel(
            "Images in progress",
            [
                Query(gauge("media_cache", "in_flight"), "prepared"),
                Query(gauge("media_fetches", "borrowed"), "fetched"),
                Query(gauge("media_fetches", "waiting"), "waiting to be fetched"),
            ],
        ),
    ],
}
"""The rows of the dashboard."""

WIDTH, HEIGHT = 8, 7
"""Size of a panel; a row has 24 columns."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> Json:
    """Return the dashboard in the format of Grafana's import."""
    return {
        "uid": "trio-pool-serve",
        "title": "trio-pool-serve",
        "tags": ["trio-pool-serve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [*_variables()]},
        "annotations": {"list": []},
        "panels": [*_panels()],
    }


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, source in (("job", "process"), ("model", 'engine{job=~"$job"}')):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({PREFIX}{source}, {name})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels() -> Iterator[Json]:
    number, y = 1, 0
    for title, panels in PANELS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, y = number + 1, y + 1
        for index, panel in enumerate(panels):
            column, line = index % (24 // WIDTH), index // (24 // WIDTH)
            place = {"x": column * WIDTH, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield _panel(panel, number, place)
            number += 1
        y += HEIGHT * -(-len(panels) // (24 // WIDTH))


def _panel(panel: Panel, number: int, place: Json) -> Json:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.is_stacked else {"fillOpacity": 10}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": each.expression,
                "legendFormat": each.legend,
            }
            for index, each in enumerate(panel.queries)
        ],
    }


# -- alerts ----------------------------------------------------------------------------------------------

BY = "namespace, job, instance"
"""The namespace is that of a pod; elsewhere there is none."""


@frozen
class Alert:
    """An alert: its expression must return something for ``minutes`` before it fires."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str


ALERTS = (
    Alert(
        "TrioPoolServeDown",
        'up{job=~"trio-pool-serve.*"} == 0 or '
        f'up == 0 and on ({BY}) last_over_time({PREFIX}process{{of="count"}}[1d])',
        2,
        "critical",
        "Prometheus cannot read the metrics of {{ $labels.instance }}",
    ),
    Alert(
        "TrioPoolServeNoEngine",
        f'sum by ({BY}, model) ({PREFIX}model{{of=~"ready|stalled"}}) == 0',
        5,
        "critical",
        "{{ $labels.instance }} has no engine for {{ $labels.model }}",
    ),
    Alert(
        "TrioPoolServeEngineStalled",
        f'max by ({BY}, model) ({{__name__=~"{PREFIX}(engine|model)", of="stalled"}}) > 0',
        1,
        "critical",
        "An engine of {{ $labels.model }} on {{ $labels.instance }} has stalled",
    ),
    Alert(
        "TrioPoolServeOverloaded",
        f'sum by ({BY}) (rate({PREFIX}refusals_total{{of=~"queue|memory"}}[5m]))'
        f" / sum by ({BY}) (rate({PREFIX}requests_total[5m])) > 0.05",
        5,
        "warning",
        "{{ $labels.instance }} refuses {{ $value | humanizePercentage }} of all requests",
    ),
    Alert(
        "TrioPoolServeSlowQueue",
        f"histogram_quantile(0.99, sum by ({BY}, model, le) (rate({PREFIX}queue_seconds_bucket[5m]))) > 2.5",
        10,
        "warning",
        "1 % of the rows for {{ $labels.model }} on {{ $labels.instance }} wait for {{ $value | humanizeDuration }}",
    ),
    Alert(
        "TrioPoolServeRowsFailed",
        f'sum by ({BY}, model) (increase({PREFIX}faults_total{{of="failed_rows"}}[10m])) > 0',
        1,
        "warning",
        "{{ $labels.model }} on {{ $labels.instance }} fails to compute inputs",
    ),
    Alert(
        "TrioPoolServeOutOfMemory",
        f'sum by ({BY}, model) (increase({PREFIX}faults_total{{of="out_of_memory"}}[30m])) > 3',
        5,
        "warning",
        "Batches of {{ $labels.model }} on {{ $labels.instance }} do not fit into the device's memory",
    ),
    Alert(
        "TrioPoolServeLoopLag",
        f"histogram_quantile(0.99, sum by ({BY}, le) (rate({PREFIX}loop_lag_seconds_bucket[5m]))) > 0.25",
        5,
        "warning",
        "The event loop of {{ $labels.instance }} is late by {{ $value | humanizeDuration }}",
    ),
    Alert(
        "TrioPoolServeEngineRestarts",
        f'sum by ({BY}, model) (changes({PREFIX}replica{{of="restarts"}}[15m])) > 2',
        1,
        "warning",
        "Engine processes of {{ $labels.model }} on {{ $labels.instance }} keep dying",
    ),
    Alert(
        "TrioPoolServeReplicaFailed",
        f'max by ({BY}, model, replica, device) ({PREFIX}replica{{of="failed"}}) > 0',
        1,
        "warning",
        "Replica {{ $labels.replica }} of {{ $labels.model }} on {{ $labels.instance }} has failed",
    ),
    Alert(
        "TrioPoolServeServerRestarts",
        f'max by ({BY}) (changes({PREFIX}process{{of="start_time_seconds"}}[30m])) > 2',
        1,
        "critical",
        "{{ $labels.instance }} keeps restarting",
    ),
    Alert(
        "TrioPoolServeRequestMemory",
        f"sum by ({BY}) ({PREFIX}request_memory_bytes) / sum by ({BY}) ({PREFIX}request_memory_limit_bytes) > 0.9",
        5,
        "warning",
        "Requests hold {{ $value | humanizePercentage }} of the memory budget of {{ $labels.instance }}",
    ),
    Alert(
        "TrioPoolServeConnections",
        f'sum by ({BY}) ({PREFIX}connections{{of="open"}}) / sum by ({BY}) ({PREFIX}connections{{of="limit"}}) > 0.9',
        5,
        "warning",
        "{{ $labels.instance }} uses {{ $value | humanizePercentage }} of its connections",
    ),
    Alert(
        "TrioPoolServeHostLost",
        f'sum by ({BY}, address) ({PREFIX}link{{of="connected"}}) == 0',
        5,
        "warning",
        "{{ $labels.instance }} has no connection to the engine at {{ $labels.address }}",
    ),
)


def alerts() -> Json:
    """Return the rules as Prometheus reads them."""
    return {"groups": [{"name": "trio-pool-serve", "rules": [*map(_rule, ALERTS)]}]}


def _rule(alert: Alert) -> Json:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": f"{alert.minutes}m",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"{RUNBOOK}#{alert.name.lower()}"},
    }


# -- files -----------------------------------------------------------------------------------------------


def files() -> Iterable[tuple[Path, str]]:
    """Return the path and the text of each file."""
    head = "# Generated by generate.py beside it.\n"
    yield FOLDER / "grafana-dashboard.json", json.dumps(dashboard(), indent=1) + "\n"
    rules = yaml.safe_dump(alerts(), sort_keys=False, width=10_000)
    yield FOLDER / "alerts.yaml", head + rules
    head = head.replace("beside it", "in deploy/monitoring")
    yield FOLDER.parent / "helm/trio-pool-serve/files/alerts.yaml", head + rules


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)

"""The alerts: each fires on what it is for and on nothing else, as Prometheus's own tool computes it."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from attrs import frozen

from tests.debian_programs import debian_program
from tests.server.server_process import ROOT

ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]

SERVER = 'instance="a:8000",job="trio-pool-serve"'
MODEL = f'{SERVER},model="m"'
REPLICA = f'{MODEL},device="cpu",replica="0"'

Series = Mapping[str, str]
"""A series without the prefix of its name → its values, one a minute."""


@frozen
class Case:
    """What fires an alert within 40 minutes, and what does not; the labels and the summary that it has then."""

    firing: Series
    quiet: Series
    summary: str
    labels: str = MODEL


def of(name: str, which: str, labels: str = MODEL) -> str:
    return f'{name}{{{labels},of="{which}"}}'


def buckets(name: str, late: str, labels: str = MODEL) -> Series:
    """A histogram that grows by 100 observations a minute, of which all but those up to 0.1 s are of up to 5 s."""
    grows = {"0.1": late, "5.0": "0+100x60", "+Inf": "0+100x60"}
    return {f'{name}_bucket{{{labels},le="{le}"}}': values for le, values in grows.items()}


CASES = {
    "Down": Case(
        {f"up{{{SERVER}}}": "0x60"},
        {f"up{{{SERVER}}}": "1 0 1 0 1x60", 'up{instance="b",job="another"}': "0x60"},  # which was never one of ours
        "Prometheus cannot read the metrics of a:8000",
        SERVER,
    ),
    "NoEngine": Case(
        {of("model", "ready"): "1x10 0x50", of("model", "loading"): "0x10 1x50", of("model", "stalled"): "0x60"},
        {of("model", "ready"): "0x3 1x60", of("model", "loading"): "1x3 0x60", of("model", "stalled"): "0x60"},
        "a:8000 has no engine for m",
    ),
    "EngineStalled": Case(
        {of("engine", "stalled"): "0x60", of("model", "stalled"): "0x20 1x40"},
        {of("engine", "stalled"): "0x60", of("model", "stalled"): "0x60", of("model", "ready"): "1x60"},
        "Nothing comes back from an engine of m on a:8000",
    ),
    "Overloaded": Case(
        {
            of("refusals_total", "queue", SERVER): "0+20x60",
            of("refusals_total", "memory", SERVER): "0+10x60",
            f"requests_total{{{SERVER}}}": "0+100x60",
        },
        {
            of("refusals_total", "queue", SERVER): "0+4x60",
            of("refusals_total", "api_key", SERVER): "0+90x60",
            f"requests_total{{{SERVER}}}": "0+100x60",
        },
        "a:8000 refuses 30% of all requests",
        SERVER,
    ),
    "SlowQueue": Case(
        buckets("queue_seconds", "0+0x60"),
        buckets("queue_seconds", "0+99.5x60"),
        "1 % of the rows for m on a:8000 wait for 4.951s",
    ),
    "RowsFailed": Case(
        {of("faults_total", "failed_rows"): "0x36 1x24"},
        {of("faults_total", "failed_rows"): "7x60", of("faults_total", "failed_batches"): "0+1x60"},
        "m on a:8000 fails to compute inputs",
    ),
    "OutOfMemory": Case(
        {of("faults_total", "out_of_memory"): "0+1x60"},
        {of("faults_total", "out_of_memory"): "0x20 1x40"},
        "Batches of m on a:8000 do not fit into the device's memory",
    ),
    "LoopLag": Case(
        buckets("loop_lag_seconds", "0+0x60", SERVER),
        buckets("loop_lag_seconds", "0+99.5x60", SERVER),
        "The event loop of a:8000 is late by 4.951s",
        SERVER,
    ),
    "EngineRestarts": Case(
        {of("replica", "restarts", REPLICA): "0x28 1 2 2 3 4 5x40"},
        {of("replica", "restarts", REPLICA): "0x10 1x10 2x40"},
        "Engine processes of m on a:8000 keep dying",
    ),
    "ReplicaFailed": Case(
        {of("replica", "failed", REPLICA): "0x20 1x40"},
        {of("replica", "failed", REPLICA): "0x60"},
        "Replica 0 of m on a:8000 has failed",
        REPLICA,
    ),
    "ServerRestarts": Case(
        {of("process", "start_time_seconds", SERVER): "1x28 2 3 4 5 5x40"},
        {of("process", "start_time_seconds", SERVER): "1x20 2x60"},
        "a:8000 keeps being started again",
        SERVER,
    ),
    "RequestMemory": Case(
        {of("request_memory_bytes", "all", SERVER): "95x60", of("request_memory_limit_bytes", "all", SERVER): "100x60"},
        {of("request_memory_bytes", "all", SERVER): "80x60", of("request_memory_limit_bytes", "all", SERVER): "100x60"},
        "Requests hold 95% of what they may on a:8000",
        SERVER,
    ),
    "Connections": Case(
        {of("connections", "open", SERVER): "4096x60", of("connections", "limit", SERVER): "4096x60"},
        {of("connections", "open", SERVER): "3000x60", of("connections", "limit", SERVER): "4096x60"},
        "a:8000 has 100% of the connections that it may have",
        SERVER,
    ),
    "HostLost": Case(
        {of("link", "connected", f'{SERVER},address="10.0.0.1:9000"'): "2x20 0x40"},
        {of("link", "connected", f'{SERVER},address="10.0.0.1:9000"'): "2x20 0x2 1x40"},
        "a:8000 has no connection to the engine at 10.0.0.1:9000",
        f'{SERVER},address="10.0.0.1:9000"',
    ),
}


def named(series: Series) -> list[dict[str, str]]:
    return [
        {"series": name if name.startswith("up{") else f"trio_pool_serve_{name}", "values": values}
        for name, values in series.items()
    ]


def promtool(*arguments: str) -> str:
    ran = subprocess.run([debian_program("promtool"), *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def compute(tmp_path: Path, *tests: dict) -> None:
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [*tests]}))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


@pytest.mark.slow
def test_each_alert_fires_on_its_own_case_and_on_nothing_else(tmp_path: Path):
    tests = []
    for rule in RULES:
        case = CASES[rule["alert"].removeprefix("TrioPoolServe")]
        labels = {**dict(re.findall(r'(\w+)="([^"]*)"', case.labels)), **rule["labels"]}
        fired = {"exp_labels": labels, "exp_annotations": {**rule["annotations"], "summary": case.summary}}
        for series, expected in ((case.firing, [fired]), (case.quiet, [])):
            asked = {"eval_time": "40m", "alertname": rule["alert"], "exp_alerts": expected}
            others = [
                {"eval_time": "40m", "alertname": other["alert"], "exp_alerts": []} for other in RULES if other != rule
            ]
            tests.append({"interval": "1m", "input_series": named(series), "alert_rule_test": [asked, *others]})
    compute(tmp_path, *tests)
    assert len(tests) == 2 * len(CASES) == 2 * len(RULES)


def test_a_server_is_missed_whatever_its_job_is_called(tmp_path: Path):
    elsewhere = 'instance="b",job="embeddings",namespace="n"'
    series = named({f"up{{{elsewhere}}}": "1x9 0x51", of("process", "count", elsewhere): "1x9 stale"})
    query = {"expr": 'count(ALERTS{alertname="TrioPoolServeDown",alertstate="firing"})', "eval_time": "40m"}
    asked = {**query, "exp_samples": [{"labels": "{}", "value": 1}]}
    compute(tmp_path, {"interval": "1m", "input_series": series, "promql_expr_test": [asked]})


def test_prometheus_accepts_the_rules():
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(ALERTS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_section_in_the_runbook(rule: dict):
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert rule["alert"] in headings
    assert anchor == rule["alert"].lower()

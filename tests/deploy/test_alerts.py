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
"""``NAME OF``, without the prefix of the name, or a whole series → its values, one a minute."""


@frozen
class Case:
    """What fires an alert within 40 minutes, and what does not; the summary and the labels that it has then."""

    firing: Series
    quiet: Series
    summary: str
    labels: str = MODEL


def buckets(name: str, late: str, labels: str = MODEL) -> Series:
    """A histogram that grows by 100 observations a minute, of which all but those up to 0.1 s are of up to 5 s."""
    grows = {"0.1": late, "5.0": "0+100x60", "+Inf": "0+100x60"}
    return {f'{name}_bucket{{{labels},le="{le}"}}': values for le, values in grows.items()}


HOST = f'{SERVER},address="10.0.0.1:9000"'
ALL_REQUESTS = {f"requests_total{{{SERVER}}}": "0+100x60"}

CASES = {
    "Down": Case(
        {f"up{{{SERVER}}}": "0x60"},
        {f"up{{{SERVER}}}": "1 0 1 0 1x60", 'up{instance="b",job="another"}': "0x60"},  # which was never one of ours
        "Prometheus cannot read the metrics of a:8000",
        SERVER,
    ),
    "NoEngine": Case(
        {"model ready": "1x10 0x50", "model loading": "0x10 1x50", "model stalled": "0x60"},
        {"model ready": "0x3 1x60", "model loading": "1x3 0x60", "model stalled": "0x60"},
        "a:8000 has no engine for m",
    ),
    "EngineStalled": Case(
        {"engine stalled": "0x60", "model stalled": "0x20 1x40"},
        {"engine stalled": "0x60", "model stalled": "0x60", "model ready": "1x60"},
        "An engine of m on a:8000 has stalled",
    ),
    "Overloaded": Case(
        {"refusals_total queue": "0+20x60", "refusals_total memory": "0+10x60", **ALL_REQUESTS},
        {"refusals_total queue": "0+4x60", "refusals_total api_key": "0+90x60", **ALL_REQUESTS},
        "a:8000 refuses 30% of all requests",
        SERVER,
    ),
    "SlowQueue": Case(
        buckets("queue_seconds", "0+0x60"),
        buckets("queue_seconds", "0+99.5x60"),
        "1 % of the rows for m on a:8000 wait for 4.951s",
    ),
    "RowsFailed": Case(
        {"faults_total failed_rows": "0x36 1x24"},
        {"faults_total failed_rows": "7x60", "faults_total failed_batches": "0+1x60"},
        "m on a:8000 fails to compute inputs",
    ),
    "OutOfMemory": Case(
        {"faults_total out_of_memory": "0+1x60"},
        {"faults_total out_of_memory": "0x20 1x40"},
        "Batches of m on a:8000 do not fit into the device's memory",
    ),
    "LoopLag": Case(
        buckets("loop_lag_seconds", "0+0x60", SERVER),
        buckets("loop_lag_seconds", "0+99.5x60", SERVER),
        "The event loop of a:8000 is late by 4.951s",
        SERVER,
    ),
    "EngineRestarts": Case(
        {f'replica{{{REPLICA},of="restarts"}}': "0x28 1 2 2 3 4 5x40"},
        {f'replica{{{REPLICA},of="restarts"}}': "0x10 1x10 2x40"},
        "Engine processes of m on a:8000 keep dying",
    ),
    "ReplicaFailed": Case(
        {"replica failed": "0x20 1x40"}, {"replica failed": "0x60"}, "Replica 0 of m on a:8000 has failed", REPLICA
    ),
    "ServerRestarts": Case(
        {"process start_time_seconds": "1x28 2 3 4 5 5x40"},
        {"process start_time_seconds": "1x20 2x60"},
        "a:8000 keeps restarting",
        SERVER,
    ),
    "RequestMemory": Case(
        {"request_memory_bytes all": "95x60", "request_memory_limit_bytes all": "100x60"},
        {"request_memory_bytes all": "80x60", "request_memory_limit_bytes all": "100x60"},
        "Requests hold 95% of the memory budget of a:8000",
        SERVER,
    ),
    "Connections": Case(
        {"connections open": "4096x60", "connections limit": "4096x60"},
        {"connections open": "3000x60", "connections limit": "4096x60"},
        "a:8000 uses 100% of its connections",
        SERVER,
    ),
    "HostLost": Case(
        {"link connected": "2x20 0x40"},
        {"link connected": "2x20 0x2 1x40"},
        "a:8000 has no connection to the engine at 10.0.0.1:9000",
        HOST,
    ),
}


def named(series: Series, labels: str) -> list[dict[str, str]]:
    found = {re.sub(r"^(\w+) (\w+)$", rf'\1{{{labels},of="\2"}}', name): values for name, values in series.items()}
    return [
        {"series": name if name.startswith("up{") else f"trio_pool_serve_{name}", "values": values}
        for name, values in found.items()
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
            tests.append(
                {"interval": "1m", "input_series": named(series, case.labels), "alert_rule_test": [asked, *others]}
            )
    compute(tmp_path, *tests)
    assert len(tests) == 2 * len(CASES) == 2 * len(RULES)


def test_a_server_is_missed_whatever_its_job_is_called(tmp_path: Path):
    elsewhere = 'instance="b",job="embeddings",namespace="n"'
    series = named({f"up{{{elsewhere}}}": "1x9 0x51", "process count": "1x9 stale"}, elsewhere)
    query = {"expr": 'count(ALERTS{alertname="TrioPoolServeDown",alertstate="firing"})', "eval_time": "40m"}
    asked = {**query, "exp_samples": [{"labels": "{}", "value": 1}]}
    compute(tmp_path, {"interval": "1m", "input_series": series, "promql_expr_test": [asked]})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_section_in_the_runbook(rule: dict):
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert rule["alert"] in headings
    assert anchor == rule["alert"].lower()

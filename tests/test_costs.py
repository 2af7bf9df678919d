"""A run says what it has cost, and fails if that has grown; one that has lost a process says so."""

import json

import pytest

from tests.costs import GROWN, machine
from tests.server.server_process import ROOT

STARTS_FIVE = """
import subprocess, sys

def test_it():
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", inner], check=True)
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
"""

DIES = """
import os

def test_it():
    os._exit(9)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("TESTS_NOTE_STARTS_IN", raising=False)
    (pytester.path / "tests").mkdir()
    pytester.makeini("[pytest]")
    in_two = ("-p", "xdist", "--numprocesses", "2", "--max-worker-restart", "0", "--dist", "loadfile")

    def run(plugin: str, *arguments: str) -> pytest.RunResult:
        with monkeypatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")  # or its processes are noted as started by this test
            return pytester.runpytest_subprocess("-p", f"tests.{plugin}", *in_two, *arguments)

    return run


def test_what_a_directory_starts_and_a_run_takes_may_grow_by_half(pytester, run):
    (pytester.path / "tests" / "test_it.py").write_text(STARTS_FIVE)
    costs = pytester.path / "tests" / "costs.json"
    assert run("costs", "--costs", "all", "--write-costs").ret == 0
    written = json.loads(costs.read_text())
    assert written["all"]["processes"] == {"tests/test_it.py": 5}
    assert written["all"]["cpu_s"][machine()]["tests"] > 0

    written["all"] = {"processes": {"tests/test_it.py": 1}, "cpu_s": {machine(): {"tests": 0.1}}}
    costs.write_text(json.dumps(written))
    grown = run("costs", "--costs", "all")
    assert grown.ret == GROWN
    grown.stdout.fnmatch_lines(
        [
            "tests starts 5 processes; 1 are written in tests/costs.json: tests/test_it.py (5 in place of 1)",
            "the run takes * CPU seconds; 0 are written in tests/costs.json for *",
            "tests takes * more than is written. Most: tests/test_it.py (*)",
        ]
    )
    assert run("costs", "--costs", "all", "--write-costs", "tests").ret == pytest.ExitCode.USAGE_ERROR


def test_a_process_that_is_lost_ends_the_run(pytester, run):
    (pytester.path / "tests" / "test_it.py").write_text(DIES)
    assert "--max-worker-restart 0" in (ROOT / "scripts" / "test").read_text()
    lost = run("parallel")
    assert lost.ret == pytest.ExitCode.INTERNAL_ERROR
    lost.stdout.fnmatch_lines(["gw?, a process that ran tests, was lost: *. Tests that were left have not been run."])

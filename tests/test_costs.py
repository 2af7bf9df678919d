"""A run says what it has cost, and fails if that has grown; one that has lost a process, or has no time, says so."""

import json
import time

import pytest

from tests.costs import GROWN
from tests.server.server_process import ROOT

STARTS_FIVE = """
import subprocess, sys

def test_it():
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", inner], check=True)
    subprocess.run([sys.executable, "-c", ""], check=True)
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


def test_what_a_directory_starts_may_grow_by_half(pytester, run):
    (pytester.path / "tests" / "test_it.py").write_text(STARTS_FIVE)
    costs = pytester.path / "tests" / "costs.json"
    assert run("costs", "--costs", "all", "--write-costs").ret == 0
    written = json.loads(costs.read_text())
    assert written == {"all": {"tests/test_it.py": 5}}

    costs.write_text(json.dumps({"all": {"tests/test_it.py": 1}}))
    grown = run("costs", "--costs", "all")
    assert grown.ret == GROWN
    grown.stdout.fnmatch_lines(
        ["tests starts 5 processes; 1 are written in tests/costs.json: tests/test_it.py (5 in place of 1)"]
    )
    assert run("costs", "--costs", "all", "--write-costs", "tests").ret == pytest.ExitCode.USAGE_ERROR


ONE_OF_EACH = """
import pytest

@pytest.mark.slow
def test_slow():
    assert 0

def test_quick():
    pass
"""


def test_no_slow_test_begins_after_the_time_that_is_given(pytester, run, monkeypatch):
    (pytester.path / "tests" / "test_it.py").write_text(ONE_OF_EACH)
    monkeypatch.setenv("NO_SLOW_TESTS_AFTER", str(time.time() - 1))
    late = run("lanes", "-rs")
    late.assert_outcomes(passed=1, skipped=1)
    late.stdout.fnmatch_lines(["SKIPPED [[]1] *: no time is left for slow tests"])
    monkeypatch.setenv("NO_SLOW_TESTS_AFTER", str(time.time() + 600))
    run("lanes").assert_outcomes(passed=1, failed=1)


def test_a_process_that_is_lost_ends_the_run(pytester, run):
    (pytester.path / "tests" / "test_it.py").write_text(DIES)
    assert "--max-worker-restart 0" in (ROOT / "scripts" / "test").read_text()
    lost = run("parallel")
    assert lost.ret == pytest.ExitCode.INTERNAL_ERROR
    lost.stdout.fnmatch_lines(["gw?, a process that ran tests, was lost: *. Tests that were left have not been run."])

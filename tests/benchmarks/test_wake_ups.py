"""One request of one text alone wakes the event loops no more often than it must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import ROOT

MOST = {
    "--engine local": {"sleeps": 2, "threads": 1, "polls": 3, "tasks": 5},
    "API process": {"sleeps": 2, "threads": 0, "polls": 4, "tasks": 8},
    "engine process": {"sleeps": 2, "threads": 1, "polls": 4, "tasks": 5},
}
"""Each loop sleeps once while others compute, and at the end. Tasks: of the connection, the request, the dispatcher
(which continues after the launch) and the request again; with an engine process, the two ends of the link as well."""


@pytest.mark.slow
def test_a_request_wakes_each_event_loop_as_often_as_there_is_something_to_wait_for(tmp_path: Path):
    """In a process of its own: the loop of an engine process runs in a thread until the process ends."""
    command = [sys.executable, "-m", "benchmarks.wake_ups", "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    counts = json.loads((tmp_path / "wake_ups.json").read_text())["counts"]
    assert counts.keys() == MOST.keys()
    more = {f"{loop}: {name}": n for loop, of in counts.items() for name, n in of.items() if n > MOST[loop][name]}
    assert more == {}

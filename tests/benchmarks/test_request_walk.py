"""The path of one request is as the structure page describes it, and goes downward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import ROOT

MOST_CALLS = 480

MOST_CLIMBS = 5
"""Calls to a higher floor: of the exchange (two), the work of a thread and its time, the outputs of rows."""


@pytest.mark.slow
def test_a_request_goes_downward_through_files_that_the_structure_page_names(tmp_path: Path):
    """In a process of its own: all calls in it are recorded."""
    command = [sys.executable, "-m", "benchmarks.request_walk", "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    walk = json.loads((tmp_path / "request_walk.json").read_text())
    assert walk["counts"]["calls"] <= MOST_CALLS
    assert len(walk["climbs"]) <= MOST_CLIMBS, walk["climbs"]
    page = (ROOT / "docs" / "structure.md").read_text()
    one_request = page[page.index("## One request") : page.index("## Inputs other than texts")]
    files = {function.partition(":")[0] for function in walk["functions"]}
    assert {file for file in files if Path(file).name not in one_request} == set()

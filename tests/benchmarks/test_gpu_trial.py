"""The whole benchmark, on CPU with a tiny model."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import server_load
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.page import TRIAL
from benchmarks.report import RESULTS
from benchmarks.servers import ROOT

COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


def listing(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.slow
def test_a_trial_on_cpu_writes_a_page_with_every_row(tmp_path):
    before = listing(RESULTS)
    flags = ["--device", "cpu", "--shape", "tiny", "--rounds", "1", "--seconds", "1", "--output-dir", str(tmp_path)]
    done = subprocess.run([*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    page = (tmp_path / "gpu.md").read_text()
    assert TRIAL in page
    document = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["aim"]["row"]: row for part in document["parts"] for row in part["rows"]}
    assert set(rows) == {aim.row for part in PARTS for aim in part.aims}
    assert all(f"| {row} |" in page for row in rows)
    assert [part["failure"] for part in document["parts"]] == [""] * (1 + len(PARTS))
    assert rows[server_load.COSINE.row]["verdict"] == "reached"
    assert all(rows[load.aim.row]["value"] > 0 for load in server_load.LOADS)
    assert "--max-queue-s 600" in page
    for name in ("gpu_memory", "gpu_overlap", "gpu_load"):
        assert f"({name}.png)" in page
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert listing(RESULTS) == before


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run(
        [*COMMAND, "--output-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("NOT MEASURED: torch")
    assert list(tmp_path.iterdir()) == []

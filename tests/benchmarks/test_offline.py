"""What benchmarks measure beside servers: the model called from Python, and the memory of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import memory_of
from benchmarks.offline import OfflineJob, open_offline


@pytest.mark.slow
async def test_the_model_is_called_in_a_process_of_its_own_and_its_vectors_are_checked():
    async with open_offline() as offline:
        computed_by = {}
        for way in ("pass", "text"):
            result = await offline.measure(OfflineJob(way=way, batch=2, tokens=8, seconds=0.01, pause_s=0.001))
            assert result.batches >= 1
            assert result.rows_per_s == pytest.approx(2e3 / result.p50_ms)
            assert result.least_cosine >= 0.999
            computed_by[way] = result.by
    assert computed_by["pass"].startswith("openvino, "), "as the server computes it"


def test_the_memory_of_a_process_and_of_those_it_has_started_is_read():
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = {process.pid: process for process in memory_of(os.getpid())}
        child.communicate(b"\n")
    assert next(iter(found)) == os.getpid()
    assert 0 < found[child.pid].pss_mib <= found[child.pid].rss_mib
    assert found[child.pid].command.startswith(f"{Path(sys.executable).name} -c print")

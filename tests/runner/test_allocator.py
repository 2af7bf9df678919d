"""Memory that a layer has freed serves the next one."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trio_pool_serve.runner.allocator import OWN_SETTINGS

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

COUNT_FAULTS = """
import json, resource, sys
from pathlib import Path
import torch
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.model_folder.folder import read_model_folder
from trio_pool_serve.offload import Offload
from trio_pool_serve.runner.loading import load_runner

def fewest_faults():
    counts = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        states = [torch.ones(5 * 2**20) for _ in range(10)]  # ten layers' at once, 20 MiB each
        del states
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)

before = fewest_faults()
load_runner(read_model_folder(Path(sys.argv[1])), ModelConfig(device="cpu"), Offload())
print(json.dumps([before, fewest_faults()]))
"""


def faults_before_and_after_loading(path: Path, **environment: str) -> tuple[int, int]:
    """Fewest page faults of taking 200 MiB in a new process, before and after a runner has been loaded there."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, str(path)],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def test_freed_memory_serves_again_once_a_runner_is_loaded(minilm: Path):
    before, after = faults_before_and_after_loading(minilm)
    assert after < before / 4


def test_what_the_environment_settled_stays(minilm: Path):
    before, after = faults_before_and_after_loading(minilm, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > before / 2

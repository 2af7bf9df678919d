"""Memory that a layer has freed serves the next one."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trio_pool_serve.runner.allocator import OWN_SETTINGS

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

KEPT_AFTER_FREEING = """
import ctypes, sys
from pathlib import Path
import torch
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.model_folder.folder import read_model_folder
from trio_pool_serve.offload import Offload
from trio_pool_serve.runner.loading import load_runner

class MallInfo2(ctypes.Structure):  # malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallInfo2

def kept_after_freeing():
    for _ in range(4):
        states = [torch.ones(5 * 2**20) for _ in range(10)]  # ten layers' at once, 20 MiB each
        del states
    return mallinfo2().fordblks

load_runner(read_model_folder(Path(sys.argv[1])), ModelConfig(device="cpu"), Offload())
print(kept_after_freeing())
"""

FREED = 200 * 2**20
"""Bytes of the states that `KEPT_AFTER_FREEING` frees at once."""


def kept_after_loading(path: Path, **environment: str) -> int:
    """Free bytes that malloc keeps after 200 MiB were freed in a new process that has loaded a runner."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", KEPT_AFTER_FREEING, str(path)],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return int(done.stdout.splitlines()[-1])


def test_freed_memory_is_kept_once_a_runner_is_loaded(minilm: Path):
    assert kept_after_loading(minilm) >= FREED


def test_what_the_environment_settled_stays(minilm: Path):
    assert kept_after_loading(minilm, MALLOC_TRIM_THRESHOLD_="131072") < FREED / 2

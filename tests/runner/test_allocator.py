"""Memory that a layer has freed serves the next one."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trio_pool_serve.runner.device import MALLOC_VARIABLES, retain_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

KEPT_AFTER_FREEING = """
import ctypes, json, sys
from pathlib import Path
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.models.loading.runner_loading import load_runner

class MallInfo2(ctypes.Structure):  # malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo2
libc.malloc.restype = ctypes.c_void_p

def kept_after_freeing():
    for _ in range(4):
        for state in [libc.malloc(20 * 2**20) for _ in range(10)]:  # ten layers' at once
            libc.free(ctypes.c_void_p(state))
    return libc.mallinfo2().fordblks

before = kept_after_freeing()
load_runner(read_model_folder(Path(sys.argv[1])), ModelConfig(device="cpu", cpu_backend="torch"), Offload())
print(json.dumps([before, kept_after_freeing()]))
"""

FREED = 200 * 2**20
"""Bytes of the states that `KEPT_AFTER_FREEING` frees at once."""


def kept_before_and_after_loading(path: Path) -> tuple[int, int]:
    """Bytes that malloc keeps after 200 MiB were freed in a new process, before and after it loads a runner."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT_AFTER_FREEING, str(path)],
        env={name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def test_freed_memory_is_kept_once_a_runner_is_loaded(minilm: Path):
    before, after = kept_before_and_after_loading(minilm)
    assert before < FREED / 2
    assert after >= FREED


def test_what_the_environment_settled_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("malloc was changed"))
    for name in MALLOC_VARIABLES:
        with monkeypatch.context() as environment:
            environment.setenv(name, "131072")
            assert not retain_freed_memory()

"""Memory that a layer has freed serves the next one; more than a batch needs is not kept."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trio_pool_serve.processes.allocator import (
    MALLOC_VARIABLES,
    MMAP_THRESHOLD_BYTES,
    allocated_bytes,
    prepare_for_loading,
    retain_freed_memory,
    return_freed_memory,
)

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

KEPT_AFTER_FREEING = """
import ctypes, json, sys
from pathlib import Path
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.models.loading.torch_loading import load_unfitted

class MallInfo2(ctypes.Structure):  # malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo2
libc.malloc.restype = ctypes.c_void_p

def kept_after_freeing(state_mib):
    for _ in range(4):
        for state in [libc.malloc(state_mib * 2**20) for _ in range(10)]:  # ten layers' at once
            libc.free(ctypes.c_void_p(state))
    return libc.mallinfo2().fordblks

before = kept_after_freeing(1)
load_unfitted(read_model_folder(Path(sys.argv[1])), ModelConfig(device="cpu", backend="torch"), Offload())
print(json.dumps([before, kept_after_freeing(1), kept_after_freeing(20)]))
"""

SMALL_BATCH, TOO_LARGE_BATCH = 10 * 2**20, 200 * 2**20
"""Bytes of the states that `KEPT_AFTER_FREEING` frees at once."""


def kept_before_and_after_loading(path: Path) -> tuple[int, int, int]:
    """Bytes that malloc keeps in a new process once states were freed.

    After a small batch before it loads a runner, after the same one since, and after one larger than it computes.
    """
    done = subprocess.run(
        [sys.executable, "-c", KEPT_AFTER_FREEING, str(path)],
        env={name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    before, after_small, after_large = json.loads(done.stdout.splitlines()[-1])
    return before, after_small, after_large


@pytest.mark.slow
def test_as_much_as_a_batch_frees_is_kept_once_a_runner_is_loaded(minilm: Path):
    before, after_small, after_large = kept_before_and_after_loading(minilm)
    assert before < SMALL_BATCH / 2
    assert after_small >= SMALL_BATCH
    assert after_large < TOO_LARGE_BATCH / 2


def test_memory_in_the_middle_of_the_heap_is_returned():
    program = """
import ctypes
from pathlib import Path
from trio_pool_serve.processes.allocator import prepare_for_loading, retain_freed_memory, return_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
prepare_for_loading()
assert retain_freed_memory(2**27)
states = [libc.malloc(2**20) for _ in range(100)]
for state in states:
    ctypes.memset(state, 1, 2**20)
for state in states[:-1]:
    libc.free(ctypes.c_void_p(state))
before = resident()
return_freed_memory()
print(before - resident())
"""
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) > 90 * 2**20


def test_what_the_environment_settled_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("malloc was changed"))
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    for name in MALLOC_VARIABLES:
        with monkeypatch.context() as environment:
            environment.setenv(name, "131072")
            assert not retain_freed_memory(2**20)
            prepare_for_loading()
            return_freed_memory()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"


def test_what_is_allocated_counts_although_freed_memory_is_used_again():
    before = allocated_bytes()
    kept = [bytearray(2**20) for _ in range(8)]
    kept.append(bytearray(2 * MMAP_THRESHOLD_BYTES))  # mapped apart from the heaps
    assert allocated_bytes() - before == pytest.approx(sum(map(len, kept)), rel=0.1)
    kept.clear()
    assert allocated_bytes() - before < 2**20

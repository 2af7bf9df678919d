"""Memory and CPU time of this process, and the names of processes."""

import os
import resource
import time
from pathlib import Path


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; shared memory counts in each process. Blocks for microseconds.

    0 without Linux's ``/proc``.
    """
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def process_usage() -> dict[str, float]:
    """Return this process's id, resident memory in bytes, and seconds of CPU time since its start."""
    return {"pid": os.getpid(), "memory_bytes": resident_bytes(), "cpu_seconds": time.process_time()}


def api_process_name(number: int) -> str:
    """Return the name of an API process in ``/load``."""
    return f"api {number}"


def engine_process_name(model: str, replica: str) -> str:
    """Return the name of an engine process in ``/load``."""
    return f"engine {model} {replica}"

"""A process that may open no more files, or start no more threads, for a while."""

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MORE_THAN_THERE_IS = 2**46
"""Bytes for a stack."""


def open_files() -> int:
    """Return how many files, pipes and sockets this process has open."""
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file, pipe or socket in the block."""
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let the system refuse all threads that are started in the block: it has not as much memory as they ask for."""
    before = threading.stack_size(MORE_THAN_THERE_IS)
    try:
        yield
    finally:
        threading.stack_size(before)

"""How threads share the cores: worker threads are nicer than the event loop, and OpenMP threads spin briefly.

Answering ``/health`` takes microseconds, a forward pass milliseconds. On a machine with no idle core the loop would
otherwise wait for its fair share behind threads whose work it started.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HAS_IDLE_PRIORITY = hasattr(os, "SCHED_IDLE")
"""Whether threads can have it: on Linux."""


def relative_niceness(by: int) -> int | None:
    """Return the calling thread's niceness plus ``by``; None to leave threads unchanged.

    Always None except on Linux, which alone has a niceness per thread.
    """
    return os.nice(0) + by if sys.platform == "linux" and by else None


def lower_priority(niceness: int | None) -> None:
    """Raise the calling thread's niceness to at least ``niceness``; threads that it starts afterwards inherit it."""
    if niceness is not None and os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


@contextmanager
def idle_priority() -> Iterator[None]:
    """Have the threads that are started in the block computed only when no others want their core (SCHED_IDLE).

    They keep the priority that they have if the system does not allow it, or has none.
    """
    if not HAS_IDLE_PRIORITY:
        yield
        return
    before = os.sched_getscheduler(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


SPIN_ROUNDS = 10_000
"""Rounds that a thread spins before it sleeps: from one kernel to the next as fast as with libgomp's default, 300,000.
The default keeps a core busy after a forward pass, when the event loop and the clients need it, and while a thread
waits for another one that has lost its core."""


def limit_openmp_spinning() -> None:
    """Make libgomp's threads sleep early, unless the environment configures it. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

"""How threads share the cores: worker threads are nicer than the event loop, and OpenMP threads spin briefly.

Answering ``/health`` takes microseconds, a forward pass milliseconds. Otherwise, on a machine without an idle core, the
loop would wait for its fair share behind the threads whose work it started.
"""

import os
import sys

NICENESS = 10
"""Niceness of computing threads and processes relative to the event loop, which then does not wait for them."""


def relative_niceness(by: int = NICENESS) -> int | None:
    """Return the calling thread's niceness plus ``by``; ``None`` to leave threads unchanged.

    ``None`` except on Linux, which alone has a niceness per thread.
    """
    return os.nice(0) + by if sys.platform == "linux" and by else None


def lower_priority(niceness: int | None) -> None:
    """Raise the calling thread's niceness to at least ``niceness``; threads that it starts later inherit it."""
    if niceness is not None and os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


SPIN_ROUNDS = 10_000
"""Rounds that a thread spins before it sleeps: as fast between kernels as libgomp's default of 300,000, which keeps a
core busy after a forward pass, when the event loop and the clients need it, and while a thread waits for another one
that has lost its core."""


def limit_openmp_spinning() -> None:
    """Make libgomp's threads sleep early, unless the environment configures it. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))

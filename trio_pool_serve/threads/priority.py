"""Niceness of threads: worker threads yield the CPU to the event loop.

Answering ``/health`` takes microseconds, a forward pass milliseconds. On a machine with no idle core the loop would
otherwise wait for its fair share behind threads whose work it started.
"""

import os
import sys


def relative_niceness(by: int) -> int | None:
    """Return the calling thread's niceness plus ``by``; None to leave threads unchanged.

    Always None except on Linux, which alone has a niceness per thread.
    """
    return os.nice(0) + by if sys.platform == "linux" and by else None


def lower_priority(niceness: int | None) -> None:
    """Raise the calling thread's niceness to at least ``niceness``; threads that it starts afterwards inherit it."""
    if niceness is not None and os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)

"""Scheduling priority: what works beside the event loop yields the processor to it.

Answering ``/health`` takes microseconds, a forward pass milliseconds. On a machine with no core to spare the loop
would otherwise wait its fair turn behind threads that it handed work to.
"""

import os
import sys


def niceness_beside(by: int) -> int | None:
    """Return the niceness that is ``by`` above the calling thread's own; None to leave threads as they are.

    Only Linux has a niceness for each thread; elsewhere it is always None.
    """
    return os.nice(0) + by if sys.platform == "linux" and by else None


def lower_priority(niceness: int | None) -> None:
    """Let the calling thread have at least that niceness; threads that it starts from then on inherit it."""
    if niceness is not None and os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)

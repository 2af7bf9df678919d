"""The lag of the event loop."""

from typing import NoReturn

import trio
from prometheus_client import Histogram


async def sample_loop_lag(histogram: Histogram, *, every_s: float = 0.1) -> NoReturn:
    """Observe, every ``every_s`` seconds forever, how many seconds too late the loop wakes a sleeping task.

    Cancellation: at once; nothing is held.
    """
    while True:
        deadline = trio.current_time() + every_s
        await trio.sleep_until(deadline)
        histogram.observe(max(0.0, trio.current_time() - deadline))

"""How late the event loop is."""

from typing import NoReturn

import trio
from prometheus_client import Histogram


async def sample_loop_lag(histogram: Histogram, *, every_s: float = 0.1) -> NoReturn:
    """Observe forever how much later than asked the loop wakes a sleeping task, in seconds.

    Cancellation: at once; nothing is held.
    """
    while True:
        due = trio.current_time() + every_s
        await trio.sleep_until(due)
        histogram.observe(max(0.0, trio.current_time() - due))

"""The end of a process that serves HTTP: no new requests, and time for the running ones to finish.

Connections get as much time from the listener (``listener.py``).
"""

import logging
from collections.abc import Awaitable, Callable

import trio

from trio_pool_serve.service import Service

logger = logging.getLogger(__name__)


async def drain(
    service: Service, stop: trio.Event, wait_for_parent: Callable[[], Awaitable[None]] = trio.sleep_forever
) -> None:
    """Refuse new requests, on new connections too, and wait while running requests finish.

    Return after ``--drain-timeout-s``, or as soon as ``wait_for_parent()`` returns: the caller exits then.
    Cancellation: at once; the caller cancels it when all requests have finished.
    """
    limit_s, running = service.config.time_limits.drain_timeout_s, service.running_tasks
    if has_requests := service.models.are_loaded.is_set():
        logger.info("draining, for at most %g s", limit_s)
    service.draining = True
    stop.set()
    try:
        with trio.move_on_after(limit_s) as limit:
            await wait_for_parent()
        # hypercorn shields its writes: a client that does not read would keep the process alive for ever.
        rows = sum(served.engine.statistics().queued_rows for served in service.served.values())
        reason = "the drain took too long" if limit.cancelled_caught else "the parent is gone"
        logger.warning("exiting with %d rows unfinished: %s", rows, reason)
    finally:
        if has_requests:
            logger.info("stopped", extra={"finished": running - service.running_tasks, "cut": service.running_tasks})

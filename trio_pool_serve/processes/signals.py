"""Signals: SIGTERM and SIGINT end a command or drain a server, SIGHUP reloads the files that the settings name."""

import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from trio_pool_serve.processes.child_process import leave

logger = logging.getLogger(__name__)


async def watch_ends(*, task_status: trio.TaskStatus[trio.Event] = trio.TASK_STATUS_IGNORED) -> None:
    """Set an event at the first SIGTERM or SIGINT, and exit at once at the second. ``started`` returns the event.

    Cancellation: at once.
    """
    ending = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started(ending)
        logger.info("%s", signal.Signals(await anext(signals)).name)
        ending.set()
        second = await anext(signals)
    logger.warning("leaving: a second signal")
    leave(128 + second)


@asynccontextmanager
async def stop_signals() -> AsyncIterator[trio.Event]:
    """Yield the event of ``watch_ends`` for the length of a block. Cancellation: as the block's."""
    async with trio.open_nursery() as nursery:
        yield await nursery.start(watch_ends)
        nursery.cancel_scope.cancel(reason="the command has ended")


async def watch_reloads(
    reload: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``reload()`` at each SIGHUP; started once signals are received.

    Cancellation: at once. SIGHUP is ignored from then on: one that has been received, but not handled, is raised again.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            await reload()

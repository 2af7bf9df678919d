"""What signals do to a command."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trio_pool_serve.processes.child_process import leave


@asynccontextmanager
async def stop_signals() -> AsyncIterator[trio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets, to stop a run; the second one ends the process.

    Cancellation: as the block's.
    """
    stop = trio.Event()

    async def watch(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if stop.is_set():
                    leave(128 + number)
                stop.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        yield stop
        nursery.cancel_scope.cancel(reason="the run has ended")

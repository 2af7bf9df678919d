"""What signals do to a command."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trio_pool_serve.processes.child_process import leave


class StopSignals:
    """The first SIGINT or SIGTERM stops a run after the windows that it computes; the second one ends the process."""

    def __init__(self) -> None:
        self.stop = trio.Event()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch for signals in the block. Cancellation: as the block's."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch)
            yield
            nursery.cancel_scope.cancel(reason="the run has ended")

    async def _watch(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.stop.is_set():
                    leave(128 + number)
                self.stop.set()

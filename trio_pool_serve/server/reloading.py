"""SIGHUP: files that the settings name, such as certificates, are read again."""

import signal
from collections.abc import Awaitable, Callable

import trio


async def watch_reloads(
    reload: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``reload()`` at each SIGHUP; ``started`` once signals are received. Cancellation: at once."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            await reload()

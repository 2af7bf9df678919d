"""Finding out that the other end of a connection is gone: a machine that is lost does not say so."""

from typing import Any

import trio

from trio_pool_serve.processes.framed_stream import FramedStream

TICKS = 6

HEARTBEATS_IN_TIMEOUT = 3
"""Each end sends at least so many messages in the time after whose silence it counts as lost."""


async def wait_silent(stream: FramedStream[Any], timeout_s: float) -> None:
    """Wait until nothing has been received for ``timeout_s`` seconds; a sixth more at most. Cancellation: at once.

    The time is counted in ticks: while this process was stopped, or its event loop was late, it did not receive.
    """
    heard, ticks = stream.received_bytes, 0
    while ticks < TICKS:
        await trio.sleep(timeout_s / TICKS)
        ticks = 0 if stream.received_bytes != heard else ticks + 1
        heard = stream.received_bytes

"""Finding out that the other end of a connection is gone: a machine that is lost does not say so."""

from typing import Any

import trio

from trio_pool_serve.processes.framed_stream import FramedStream

TICKS = 6

HEARTBEATS_IN_TIMEOUT = 3
"""Each end sends at least so many messages in the time after whose silence it counts as lost."""


async def wait_silent(stream: FramedStream[Any], timeout_s: float) -> str:
    """Wait until nothing has been received, or nothing could be sent, for ``timeout_s`` seconds; a sixth more at most.

    Return which, as a clause. Both ends send heartbeats: what cannot be sent is not read at the other end, which the
    kernel finds out too late (with TCP_USER_TIMEOUT at 1 s it took more than 7 s in 2 of 33 times).
    The time is counted in ticks: while this process was stopped, or its event loop was late, it did not receive.
    Cancellation: at once.
    """
    received, sent = stream.received_bytes, stream.sent_bytes
    unheard = unread = 0
    while True:
        await trio.sleep(timeout_s / TICKS)
        unheard = 0 if stream.received_bytes != received else unheard + 1
        unread = 0 if stream.sent_bytes != sent else unread + 1
        received, sent = stream.received_bytes, stream.sent_bytes
        if unheard >= TICKS:
            return f"nothing was received for {timeout_s:g} s"
        if unread >= TICKS:
            return f"nothing could be sent for {timeout_s:g} s"

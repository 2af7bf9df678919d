"""What both ends of a link do: they send while they receive, and notice that the other end is gone."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import trio

from trio_pool_serve.engine.remote.keys import LinkRefusedError
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

TICKS = 6

HEARTBEATS_IN_TIMEOUT = 3
"""Each end sends at least so many messages in the time after whose silence it counts as lost."""


async def run_link(
    stream: FramedStream[Message],
    timeout_s: float,
    other_end: str,
    receive: Callable[[trio.Nursery, Message, memoryview], Awaitable[None]],
    *tasks: Callable[[], Awaitable[object]],
) -> str:
    """Run one end of a link until the other end disconnects, is refused or has been silent for ``timeout_s`` seconds.

    Returns the reason for which it was refused, silence included, otherwise an empty string. ``receive`` is called with
    each message; it may start tasks in the nursery of the ``tasks``, and raise ``LinkRefusedError``. Other exceptions
    end the link, too, and are logged. Cancellation: at once.
    """
    refusal = ""

    async def receive_all() -> None:
        while (received := await stream.receive()) is not None:
            await receive(nursery, *received)
        nursery.cancel_scope.cancel(reason=f"the {other_end} has disconnected")

    try:
        async with trio.open_nursery() as nursery:
            for task in (receive_all, *tasks):
                nursery.start_soon(task)
            await wait_silent(stream, timeout_s)
    except* trio.BrokenResourceError:
        logger.info("an %s has disconnected while something was sent to it", other_end)
    except* LinkRefusedError as refusals:
        refusal = str(refusals.exceptions[0])
    except* Exception:
        logger.exception("the link to an %s has failed", other_end)
    return refusal


async def wait_silent(stream: FramedStream[Any], timeout_s: float) -> NoReturn:
    """Raise ``LinkRefusedError`` when nothing was received, or nothing could be sent, for ``timeout_s`` seconds.

    It may take a sixth longer. Both ends send heartbeats: what cannot be sent is not read at the other end, which the
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
            raise LinkRefusedError(f"nothing was received for {timeout_s:g} s")
        if unread >= TICKS:
            raise LinkRefusedError(f"nothing could be sent for {timeout_s:g} s")

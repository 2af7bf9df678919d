"""A link between an API process and an engine process: its messages, its silence, and its end."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import trio

from trio_pool_serve.processes.child_process import TICKS
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

HEARTBEATS_IN_TIMEOUT = 3
"""Minimum messages that each end sends within the timeout of the link."""


class LinkRefusedError(Exception):
    """One end of a connection has refused the other; the message says why."""


async def run_link(
    stream: FramedStream[Message],
    timeout_s: float,
    other_end: str,
    receive: Callable[[trio.Nursery, Message, memoryview], Awaitable[None]],
    *tasks: Callable[[], Awaitable[object]],
) -> str:
    """Run one end of a link until the other end disconnects, is refused or has been silent for ``timeout_s`` seconds.

    Returns why it was refused (silence is a reason, too), or an empty string. ``receive`` is called with each message;
    it may start tasks in the nursery of the ``tasks``, and raise ``LinkRefusedError``. Other exceptions also end the
    link, and are logged. At the end, the connection is closed. Cancellation: at once.
    """
    refusal = ""

    async def receive_all() -> None:
        while (received := await stream.receive()) is not None:
            await receive(nursery, *received)
        # Without this, the tasks would send until the kernel reports that the other end is gone.
        nursery.cancel_scope.cancel(reason=f"the {other_end} disconnected")

    try:
        async with trio.open_nursery() as nursery:
            for task in (receive_all, *tasks):
                nursery.start_soon(task)
            await wait_silent(stream, timeout_s)
    except* trio.BrokenResourceError:  # as usual: processes end while others send to them
        logger.info("an %s disconnected while a message was sent to it", other_end)
    except* LinkRefusedError as refusals:
        # Several tasks may refuse in one round of the event loop: the reason of one of them will do.
        refusal = str(refusals.exceptions[0])
    except* Exception:
        # Whatever one peer sends must not end the process, or the links to others.
        logger.exception("the link to an %s failed", other_end)
    finally:
        # Not shielded: ``aclose`` closes the socket before its checkpoint, so also after cancellation.
        await stream.aclose()
    return refusal


async def keep_calling(period_s: float, wake: Callable[[], object]) -> NoReturn:
    """Call ``wake`` once per period, so that a task sends a heartbeat. Cancellation: at once."""
    while True:
        await trio.sleep(period_s)
        wake()


async def wait_silent(stream: FramedStream[Any], timeout_s: float) -> NoReturn:
    """Raise ``LinkRefusedError`` if nothing was received, or nothing could be sent, for ``timeout_s`` seconds.

    It may take a sixth longer. Both ends send heartbeats: if nothing can be sent, the other end does not read, which
    the kernel notices too late (with TCP_USER_TIMEOUT at 1 s it took more than 7 s in 2 of 33 times). Time is counted
    in ticks, because nothing is received while this process is stopped or its event loop is late. Cancellation: at
    once.
    """
    # Bytes rather than messages: on a slow path, one large frame may take several times the timeout.
    received, sent = stream.received_bytes, stream.sent_bytes
    unheard = unread = 0
    while max(unheard, unread) < TICKS:
        await trio.sleep(timeout_s / TICKS)
        unheard = 0 if stream.received_bytes != received else unheard + 1
        unread = 0 if stream.sent_bytes != sent else unread + 1
        received, sent = stream.received_bytes, stream.sent_bytes
    raise LinkRefusedError(f"nothing {'was received' if unheard >= TICKS else 'could be sent'} for {timeout_s:g} s")

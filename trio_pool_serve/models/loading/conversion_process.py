"""A process that loads models by torch and converts them: its memory goes with it when it ends."""

import errno
import logging
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.conversion_messages import (
    ConversionJob,
    Convert,
    Converted,
    Failed,
    FromConversion,
    GiveUp,
    Loaded,
    LogLine,
    ToConversion,
)
from trio_pool_serve.models.loading.runner_loader import import_transformers
from trio_pool_serve.processes.child_process import leave, run_as_child, send_to_parent
from trio_pool_serve.processes.framed_stream import FramedStream, sendable

if TYPE_CHECKING:
    from trio_pool_serve.models.loading.conversion import Conversion


class _ToParent(logging.Handler):
    """Sends what is logged in a thread of trio to the parent, which logs it as its own lines."""

    def __init__(self, channel: FramedStream[ToConversion]) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        line = LogLine(record.levelno, record.name, sendable(record.getMessage()))
        with suppress(RuntimeError):  # a thread of a library's
            trio.from_thread.run(send_to_parent, self._channel, line)


async def main(channel: FramedStream[ToConversion], job: ToConversion) -> int:
    """Load models and tell the parent, and convert each when told so; return the exit status.

    It ends at once when the parent does. Cancellation: at once; a thread that converts goes on.
    """
    logging.basicConfig(level=logging.INFO, handlers=[_ToParent(channel)])
    orders, waiting = trio.open_memory_channel[ToConversion](math.inf)
    orders.send_nowait(job)
    conversions: dict[int, Conversion] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_receive, channel, orders)
        async for order in waiting:
            if isinstance(order, GiveUp):
                conversions.pop(order.number, None)
                continue
            await send_to_parent(channel, await trio.to_thread.run_sync(_obey, order, conversions))
    return 0


def _obey(order: ConversionJob | Convert, conversions: "dict[int, Conversion]") -> FromConversion:
    try:
        if isinstance(order, ConversionJob):
            conversions[order.number] = _load(order)
            return Loaded()
        return Converted(conversions[order.number].convert(Path(order.folder)))
    except ModelLoadError as error:
        return Failed(sendable(str(error)))
    except OSError as error:
        return Failed(sendable(str(error)), error.errno or errno.EIO)


async def _receive(channel: FramedStream[ToConversion], orders: trio.MemorySendChannel[ToConversion]) -> None:
    """Pass on what the parent sends. Ends the process when the parent has ended or does not need it any more."""
    while (received := await channel.receive()) is not None:
        orders.send_nowait(received[0])
    leave(0)


def _load(job: ConversionJob) -> "Conversion":
    import_transformers()
    # Imported here, where it does not keep this process from noticing that its parent has ended.
    from transformers.utils.logging import disable_progress_bar

    from trio_pool_serve.models.loading.conversion import Conversion

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]

    conversion = Conversion()
    conversion.load(job)
    return conversion


if __name__ == "__main__":
    run_as_child(main, ToConversion)

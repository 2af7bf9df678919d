"""A process that loads one model by torch and converts it: its memory goes with it when it ends."""

import errno
import logging
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
    """Load the model and tell the parent, then convert it when told so; return the exit status.

    It ends at once when the parent does. Cancellation: at once; a thread that converts goes on.
    """
    assert isinstance(job, ConversionJob)  # noqa: S101  (the first message)
    logging.basicConfig(level=logging.INFO, handlers=[_ToParent(channel)])
    to_convert, folders = trio.open_memory_channel[Path](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_receive, channel, to_convert)
        try:
            conversion = await trio.to_thread.run_sync(_load, job)
        except ModelLoadError as error:
            await send_to_parent(channel, Failed(sendable(str(error))))
        else:
            await send_to_parent(channel, Loaded())
            async for folder in folders:  # another one, if the disk is full
                await send_to_parent(channel, await trio.to_thread.run_sync(_convert, conversion, folder))
        nursery.cancel_scope.cancel(reason="the model cannot be loaded")
    return 0


def _convert(conversion: "Conversion", folder: Path) -> Converted | Failed:
    try:
        return Converted(conversion.convert(folder))
    except OSError as error:
        return Failed(sendable(str(error)), error.errno or errno.EIO)


async def _receive(channel: FramedStream[ToConversion], to_convert: trio.MemorySendChannel[Path]) -> None:
    """Pass on what to convert. Ends the process when the parent has ended or does not need it any more."""
    while (received := await channel.receive()) is not None:
        assert isinstance(received[0], Convert)  # noqa: S101
        await to_convert.send(Path(received[0].folder))
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

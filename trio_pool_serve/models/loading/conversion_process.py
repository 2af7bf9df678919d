"""A process that loads models by torch and converts them: its memory goes with it when it ends."""

import errno
import logging
import sys
from contextlib import suppress
from pathlib import Path
from traceback import format_exc
from typing import TYPE_CHECKING

import trio

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.conversion_messages import (
    ConversionJob,
    Convert,
    GiveUp,
    LogLine,
    Reply,
    ToConversion,
)
from trio_pool_serve.models.loading.runner_loader import import_transformers
from trio_pool_serve.processes.child_process import leave, run_as_child, send_to_parent
from trio_pool_serve.processes.framed_stream import FramedStream, sendable

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.preparation import Preparation

logger = logging.getLogger(__name__)


class _ToParent(logging.Handler):
    """Sends what is logged in a thread of trio to the parent, which logs it as its own lines."""

    def __init__(self, channel: FramedStream[ToConversion]) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        line = LogLine(record.levelno, record.name, sendable(self.format(record)))
        with suppress(RuntimeError):  # a thread of a library's
            trio.from_thread.run(send_to_parent, self._channel, line)


async def main(channel: FramedStream[ToConversion], job: ToConversion) -> int:
    """Load models and convert them, as the parent orders, until it has ended or needs this process no more.

    Cancellation: at once; a thread that converts goes on.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_ToParent(channel)])
    models: dict[int, Preparation] = {}
    order = job
    async with trio.open_nursery() as nursery:
        while True:
            if isinstance(order, GiveUp):
                models.pop(order.number, None)
            else:  # the only one: the parent waits for the reply
                nursery.start_soon(_obey, channel, order, models)
            if (received := await channel.receive()) is None:
                leave(0)
            order, _ = received


async def _obey(
    channel: FramedStream[ToConversion], order: ConversionJob | Convert, models: "dict[int, Preparation]"
) -> None:
    await send_to_parent(channel, await trio.to_thread.run_sync(_reply_to, order, models))


def _reply_to(order: ConversionJob | Convert, models: "dict[int, Preparation]") -> Reply:
    """Load or convert a model. Whatever fails, fails this model only: the process has others."""
    try:
        if isinstance(order, Convert):
            return Reply(models[order.number].convert(Path(order.folder)))
        models[order.number] = _load(order)
        return Reply()
    except ModelLoadError as error:
        return Reply(error=sendable(str(error)))
    except Exception as error:
        if isinstance(error, OSError) and isinstance(order, Convert):
            return Reply(error=sendable(error.strerror or str(error)), errno=error.errno or errno.EIO)
        # The innermost calls: what is sent is cut at its end.
        logger.error("a model cannot be loaded:\n%s", format_exc(limit=-12))  # noqa: TRY400
        first_line = next(iter(str(error).splitlines()), "")
        return Reply(error=sendable(f"The model cannot be loaded: {type(error).__name__}: {first_line}"))


def _load(job: ConversionJob) -> "Preparation":
    import_transformers()
    # Imported here, where it does not keep this process from noticing that its parent has ended.
    from transformers.utils.logging import disable_progress_bar

    from trio_pool_serve.models.loading.conversion import load_to_convert

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    return load_to_convert(job)


if __name__ == "__main__":
    run_as_child(main, ToConversion)

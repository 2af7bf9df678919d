"""The process that loads models with torch and converts them; its memory is free again when it ends."""

import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import format_exc
from typing import TYPE_CHECKING

import trio

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import exported_file
from trio_pool_serve.models.loading.architectures import import_transformers
from trio_pool_serve.models.loading.converter import (
    ConversionJob,
    Convert,
    GiveUp,
    LogLine,
    Reply,
    Step,
    ToConversion,
)
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.processes.child_process import leave, run_as_child, send_to_parent
from trio_pool_serve.processes.framed_stream import FramedStream, sendable
from trio_pool_serve.runner.openvino.converted_model import UnusableGraphError
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.telemetry.start_display import report_step, show_steps_with
from trio_pool_serve.threads.offload import Offload

if TYPE_CHECKING:
    from trio_pool_serve.models.loading.compiled_code import Compilation
    from trio_pool_serve.runner.openvino.preparation import Preparation

logger = logging.getLogger(__name__)


class _ToParent(logging.Handler):
    """Sends the log lines of trio's threads to the parent, which logs them."""

    def __init__(self, channel: FramedStream[ToConversion]) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line to the parent."""
        _tell_parent(self._channel, partial(LogLine, record.levelno, record.name), self.format(record))


def _tell_parent(channel: FramedStream[ToConversion], message_of: Callable[[str], Step | LogLine], text: str) -> None:
    with suppress(RuntimeError):  # in a thread that a library started
        trio.from_thread.run(send_to_parent, channel, message_of(sendable(text)))


async def main(channel: FramedStream[ToConversion], order: ToConversion) -> int:
    """Load and convert models on the parent's orders, until the parent closes the channel or ends.

    Cancellation: at once; a thread that converts goes on.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_ToParent(channel)])
    logging.captureWarnings(capture=True)
    show_steps_with(partial(_tell_parent, channel, Step))
    models: dict[int, Preparation | Compilation] = {}
    async with trio.open_nursery() as nursery:
        while True:
            if isinstance(order, GiveUp):
                models.pop(order.number, None)
            else:  # one at a time: the parent waits for the reply
                nursery.start_soon(_obey, channel, order, models)
            if (received := await channel.receive()) is None:
                leave(0)
            order, _ = received


async def _obey(
    channel: FramedStream[ToConversion], order: ConversionJob | Convert, models: "dict[int, Preparation | Compilation]"
) -> None:
    await send_to_parent(channel, await trio.to_thread.run_sync(_reply_to, order, models))


def _reply_to(order: ConversionJob | Convert, models: "dict[int, Preparation | Compilation]") -> Reply:
    """Load or convert a model. Any error fails this model only: the process may have others."""
    try:
        if isinstance(order, Convert):
            return Reply(models[order.number].convert(Path(order.folder)))
        models[order.number] = load_to_convert(order)
        return Reply()
    except ModelLoadError as error:
        return Reply(error=sendable(str(error)), refused=isinstance(error, UnusableGraphError))
    except Exception as error:
        if isinstance(error, OSError) and isinstance(order, Convert):
            return Reply(error=sendable(error.strerror or str(error)), errno=error.errno or errno.EIO)
        # Only the innermost calls: long lines are cut at the end.
        failed = "converted" if isinstance(order, Convert) else "loaded"
        logger.error("a model cannot be %s:\n%s", failed, format_exc(limit=-12))  # noqa: TRY400
        first_line = next(iter(str(error).splitlines()), "")
        return Reply(error=sendable(f"The model cannot be {failed}: {type(error).__name__}: {first_line}"))


def load_to_convert(job: ConversionJob) -> "Preparation | Compilation":
    """Load a model and compute a batch with torch. Blocks for seconds. Raises ``ModelLoadError``.

    Also writes its tokenizer to the cache, so that the process that serves the model need not make it.
    """
    report_step("importing torch")
    import_transformers()
    # Imported here: this takes seconds, in which the process could not notice that its parent has ended.
    from trio_pool_serve.models.folder import read_model_folder
    from trio_pool_serve.models.loading.compiled_code import Compilation
    from trio_pool_serve.models.loading.sample_prompts import extreme_prompts, sample_prompts
    from trio_pool_serve.models.loading.torch_loading import load_warm_runner
    from trio_pool_serve.runner.openvino.preparation import Preparation

    for name in job.imports:
        import_module(name)
    config = job.config
    folder = read_model_folder(Path(job.folder), config)
    if folder.kind.load != job.kind:  # it would be converted without its heads
        raise ModelLoadError(
            f"The process that converts the model recognises it as {folder.kind.load}, not {job.kind}. Register its "
            f"kind where {job.imports[-1]} is imported, or use --backend torch, which needs no conversion."
        )
    if job.compiles:
        return Compilation(load_warm_runner(folder, config, Offload()))
    load_tokenizer(folder, trust_remote_code=config.trust_remote_code, cache=ModelCache.of(config.cache_dir))
    return Preparation(
        load_warm_runner(folder, config, Offload()),
        config,
        extreme_prompts=partial(extreme_prompts, folder, trust_remote_code=config.trust_remote_code),
        sample_prompts=partial(sample_prompts, folder, trust_remote_code=config.trust_remote_code),
        may_time=job.may_time,
        exported=exported_file(folder.transformer_path),
    )


if __name__ == "__main__":
    run_as_child(main, ToConversion)

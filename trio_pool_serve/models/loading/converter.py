"""Converting models to OpenVINO's format in another process, for threads of this one that load models."""

import itertools
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from attrs import define, field

from trio_pool_serve.config import ModelConfig, imported_plugins
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.child_process import BlockingChild
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel, UnusableGraphError
from trio_pool_serve.telemetry.start_display import report_step

MODULE = "trio_pool_serve.models.loading.conversion_process"

CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals that end a process for a fault in its own code, such as in a kernel of OpenVINO."""


class ConversionJob(msgspec.Struct, frozen=True, tag=True):
    """A model's folder, and the settings to load it with.

    ``imports`` are modules to import first: they register the kind of model whose ``load`` is ``kind``.
    """

    folder: str
    config: ModelConfig
    imports: list[str]
    kind: str
    may_time: bool = False
    compiles: bool = False
    """Whether it is compiled by torch, in place of a conversion to OpenVINO's format."""
    number: int = msgspec.field(default_factory=itertools.count(1).__next__)
    """The model's number in later messages."""

    @classmethod
    def of(cls, folder: AnyModelFolder, config: ModelConfig, **how: bool) -> "ConversionJob":
        """Return the job for a folder that was read, in a process that imports the same plugins."""
        kind = folder.kind
        return cls(str(folder.path), config, [*imported_plugins, kind.read.__module__], kind.load, **how)


class Convert(msgspec.Struct, frozen=True, tag=True):
    """Write the conversion of a model to an empty folder."""

    number: int
    folder: str


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Tells the process that the model is not needed any more."""

    number: int


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line for the log."""

    level: int
    logger: str
    text: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """A step of loading or converting, to be shown."""

    text: str


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to an order: the model is loaded or compiled, or converted, or ``error`` is the reason why not.

    ``model`` is the record of a conversion. ``refused``: OpenVINO cannot compute the model. ``errno``: the folder
    cannot be written; 0 for other errors.
    """

    model: ConvertedModel | None = None
    error: str = ""
    refused: bool = False
    errno: int = 0


ToConversion: TypeAlias = ConversionJob | Convert | GiveUp
FromConversion: TypeAlias = LogLine | Step | Reply


class Converter(Protocol):
    """A model that is loaded for its conversion: a ``ChildConverter``, or a ``Preparation`` in this process."""

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder; return its record. Blocks for seconds to minutes.

        Raises ``OSError`` if the folder cannot be written, and ``UnusableGraphError``.
        """

    def close(self) -> None:
        """Free the memory of the model."""


MakeConverter = Callable[[ConversionJob], Converter]
"""Loads a model with torch. Blocks for seconds. Raises ``ModelLoadError``, or ``OSError`` if no process can start."""


@define(eq=False)
class ConverterProcess(BlockingChild[FromConversion]):
    """The process that converts the models of this process: one for all, as torch takes seconds and hundreds of MB.

    It ends when this process ends, for whatever reason, or when no model needs it any more. A model is compiled by a
    new process.
    """

    models: set[int] = field(init=False, factory=set)
    """Numbers of the models that it has loaded or will load."""


_turn = threading.RLock()
"""One model at a time is loaded or converted, for minutes."""
_lock = threading.RLock()
"""Protects ``_latest`` and sending. Held for milliseconds: the event loop may close a dropped model."""
_latest: list[ConverterProcess] = []
"""The process that was started last, if there is one; it may have ended."""
_decoder: "msgspec.msgpack.Decoder[FromConversion]" = msgspec.msgpack.Decoder(FromConversion)
"""Made here, before there are threads: msgspec may crash if it meets a class for the first time in two at once."""


@define(eq=False)
class ChildConverter:
    """One model in the ``ConverterProcess``, loaded with torch: a ``Converter``."""

    _job: ConversionJob
    _process: ConverterProcess | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._join()

    @classmethod
    def loaded(cls, job: ConversionJob) -> "ChildConverter":
        """Return a loaded model. Raises ``OSError`` if no process can start, and the errors of ``load``."""
        child = cls(job)
        try:
            child.load()
        except BaseException:
            child.close()
            raise
        return child

    def _join(self) -> ConverterProcess:
        """Return the running process, or a new one; it has not loaded the model.

        Only a new one compiles: torch does not write again what it has compiled for another model.
        """
        self.close()
        with _lock:
            process = next(iter(_latest), None)
            if process is None or process.process.poll() is not None or self._job.compiles:
                process = ConverterProcess(MODULE, _decoder)
                _latest[:] = [process]
            process.models.add(self._job.number)
            self._process = process
            return process

    def __del__(self) -> None:
        """Close it if it is still open because its model was not needed."""
        self.close()

    def close(self) -> None:
        """Give up the model, and end the process if no other model needs it."""
        with _lock:
            process, self._process = self._process, None
            if process is None:
                return
            process.models.discard(self._job.number)
            if process.models:
                process.send(GiveUp(self._job.number))
            else:
                process.leave(0)

    def load(self) -> None:
        """Load the model. Blocks for seconds. Raises ``ModelLoadError``, also if the process dies."""
        self._ask(self._job)

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder; return its record. Blocks for seconds to minutes.

        Raises ``OSError`` if the folder cannot be written, ``UnusableGraphError`` if the process crashes, and
        ``ModelLoadError`` if it dies otherwise.
        """
        model = self._ask(Convert(self._job.number, str(folder))).model
        assert model is not None  # noqa: S101
        return model

    def compile(self, folder: Path) -> None:
        """Write the compiler's files to an empty folder. Blocks for seconds to a minute. Raises as ``convert``."""
        self._ask(Convert(self._job.number, str(folder)))

    def _ask(self, order: ConversionJob | Convert) -> Reply:
        """Return the reply. If another model has ended the process, this one is loaded again in a new process."""
        with _turn:
            process = self._process
            if process is None or process.channel.fileno() < 0:  # its end has been noticed
                process = self._join()
                if order is not self._job:
                    self._ask(self._job)
            with _lock:
                process.send(order)
            while not isinstance(message := process.status(), Reply):
                match message:
                    case None:
                        error_type = UnusableGraphError if -process.process.returncode in CRASHES else ModelLoadError
                        raise error_type(f"The process that converts the model {process.end}.")
                    case Step(text):
                        report_step(text)
                    case LogLine(level, name, text):
                        logging.getLogger(name).log(level, "%s", text)
            if message.errno:
                raise OSError(message.errno, message.error)
            require(not message.refused, message.error, UnusableGraphError)
            require(not message.error, message.error)
            return message

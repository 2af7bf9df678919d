"""A process that converts models for this one, from threads that load models."""

import io
import itertools
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
from attrs import define, field

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.conversion_messages import (
    ConversionJob,
    Convert,
    FromConversion,
    GiveUp,
    LogLine,
    Reply,
    ToConversion,
)
from trio_pool_serve.processes.framed_stream import PREFIX
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel

MODULE = "trio_pool_serve.models.loading.conversion_process"

CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""What ends a process for a fault in its own code, as in a kernel of OpenVINO."""


class ConversionCrashError(ModelLoadError):
    """The process that converts a model has crashed."""


@define(eq=False)
class ConverterProcess:
    """The process that converts this process's models: one for all, as torch alone takes hundreds of MB and seconds.

    It ends with this process, however that ends, and once no model needs it.
    """

    popen: "subprocess.Popen[bytes]" = field(init=False)
    channel: socket.socket = field(init=False)
    _replies: io.BufferedReader = field(init=False)
    models: set[int] = field(init=False, factory=set)
    """Numbers of the models that it has loaded or will load."""

    def __attrs_post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        self._replies = self.channel.makefile("rb")
        with theirs:
            command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
            self.popen = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours may be a table's
                pass_fds=[theirs.fileno()],
            )

    def send(self, message: ToConversion) -> None:
        """Send a message; does nothing if the process has ended, as receiving tells."""
        header = msgspec.msgpack.encode(message)
        with _lock, suppress(ConnectionError):
            self.channel.sendall(PREFIX.pack(len(header), 0) + header)

    def receive(self) -> FromConversion:
        """Return its next message. Raises ``ModelLoadError`` if it has ended; no other model is given to it then."""
        with suppress(ConnectionError, struct.error):  # nothing more
            size, _ = PREFIX.unpack(self._replies.read(PREFIX.size))
            message = self._replies.read(size)
            if len(message) == size:
                try:
                    return _decoder.decode(message)
                except msgspec.DecodeError:  # the package was upgraded meanwhile
                    self.popen.kill()
        code = self.popen.wait()
        with _lock:
            if self in _running:
                _running.remove(self)
        how = f"was ended by signal {-code}" if code < 0 else f"left with status {code}"
        error_type = ConversionCrashError if -code in CRASHES else ModelLoadError
        raise error_type(f"The process that converts the model {how}.")

    def end(self) -> None:
        """End it."""
        self._replies.close()
        self.channel.close()
        self.popen.kill()
        self.popen.wait()


_numbers = itertools.count(1)
_turn = threading.RLock()
"""One model at a time is loaded or converted, for minutes."""
_lock = threading.RLock()
"""Protects the list below and sending. Held for milliseconds: the event loop may close a model that was dropped."""
_running: list[ConverterProcess] = []
"""At most one."""
_decoder: "msgspec.msgpack.Decoder[FromConversion]" = msgspec.msgpack.Decoder(FromConversion)


@define(eq=False)
class ConversionChild:
    """One model in the ``ConverterProcess``, loaded by torch: a ``Converter``."""

    _number: int = field(init=False, factory=lambda: next(_numbers))
    _process: ConverterProcess | None = field(init=False, default=None)
    _job: ConversionJob | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._join()

    @classmethod
    def loaded(cls, job: ConversionJob) -> "ConversionChild":
        """Return a model that is loaded. Raises ``OSError`` if no process can be started, and as ``load``."""
        child = cls()
        try:
            child.load(job)
        except BaseException:
            child.close()
            raise
        return child

    def _join(self) -> ConverterProcess:
        """Return the process that runs, or else a new one, which has not loaded the model."""
        self.close()
        with _lock:
            process = next(iter(_running), None)
            if process is None or process.popen.poll() is not None:
                process = ConverterProcess()
                _running[:] = [process]
            process.models.add(self._number)
            self._process = process
            return process

    def __del__(self) -> None:
        """Close it if it is still open: its model was not needed after all."""
        self.close()

    def close(self) -> None:
        """Give up the model, and end the process if no other needs it."""
        with _lock:
            process, self._process = self._process, None
            if process is None:
                return
            process.models.discard(self._number)
            if process.models:
                process.send(GiveUp(self._number))
                return
            if process in _running:
                _running.remove(process)
            process.end()

    def load(self, job: ConversionJob) -> None:
        """Load the model. Blocks for seconds. Raises ``ModelLoadError``, also if the process dies."""
        self._job = msgspec.structs.replace(job, number=self._number)
        self._ask(self._job)

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder; return its record. Blocks for seconds to minutes.

        Raises ``OSError`` if the folder cannot be written, and ``ModelLoadError`` if the process dies:
        ``ConversionCrashError`` if by a fault of its own.
        """
        model = self._ask(Convert(self._number, str(folder))).model
        assert model is not None  # noqa: S101
        return model

    def _ask(self, order: ConversionJob | Convert) -> Reply:
        """Return the reply. If the process has died of another model, this one is loaded again in a new one."""
        with _turn:
            process = self._process
            if process is None or process not in _running:
                process = self._join()
                if self._job is not None and order is not self._job:
                    self._ask(self._job)
            process.send(order)
            while isinstance(message := process.receive(), LogLine):
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            if message.errno:
                raise OSError(message.errno, message.error)
            if message.error:
                raise ModelLoadError(message.error)
            return message

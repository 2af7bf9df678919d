"""A process that converts a model for this one, from a thread that loads models."""

import itertools
import logging
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import define, field

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
from trio_pool_serve.processes.framed_stream import PREFIX
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel

T = TypeVar("T")

MODULE = "trio_pool_serve.models.loading.conversion_process"


@define(eq=False)
class ConverterProcess:
    """The process that converts this process's models: one for all, as torch alone takes hundreds of MB and seconds.

    It ends with this process, however that ends, and once no model needs it.
    """

    popen: "subprocess.Popen[bytes]" = field(init=False)
    channel: socket.socket = field(init=False)
    models: set[int] = field(init=False, factory=set)
    """Numbers of the models that it has loaded or will load."""

    def __attrs_post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
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

    def end(self) -> None:
        """End it."""
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


@define(eq=False)
class ConversionChild:
    """One model in the ``ConverterProcess``, loaded by torch."""

    _number: int = field(init=False, factory=lambda: next(_numbers))
    _process: ConverterProcess = field(init=False)
    _job: ConversionJob | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._join()

    def _join(self) -> None:
        with _lock:
            if not _running or _running[0].popen.poll() is not None:
                _running[:] = [ConverterProcess()]
            self._process = _running[0]
            self._process.models.add(self._number)

    def __del__(self) -> None:
        """Close it if nobody has: its model was not needed after all."""
        self.close()

    def close(self) -> None:
        """Give up the model, and end the process if no other needs it."""
        with _lock:
            process = getattr(self, "_process", None)
            if process is None or self._number not in process.models:
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
        with _turn:
            self._process.send(self._job)
            self._receive(Loaded)

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder; return its record. Blocks for seconds to minutes.

        Raises ``OSError`` if the folder cannot be written, and ``ModelLoadError`` if the process dies. If it has died
        of another model, this one is loaded again.
        """
        with _turn:
            if self._job is not None and self._process not in _running:
                self._join()
                self.load(self._job)
            self._process.send(Convert(self._number, str(folder)))
            return self._receive(Converted).model

    def _receive(self, kind: type[T]) -> T:
        while True:
            message = self._next_message()
            match message:
                case LogLine():
                    logging.getLogger(message.logger).log(message.level, "%s", message.text)
                case Failed() if message.errno:
                    raise OSError(message.errno, message.error)
                case Failed():
                    raise ModelLoadError(message.error)
                case _:
                    assert isinstance(message, kind)  # noqa: S101
                    return message

    def _next_message(self) -> FromConversion:
        size, _ = PREFIX.unpack(self._read(PREFIX.size))
        return _decoder.decode(self._read(size))

    def _read(self, size: int) -> bytes:
        """Return so many bytes. Raises ``ModelLoadError`` if the process has ended."""
        received = bytearray()
        while len(received) < size:
            part = b""
            with suppress(ConnectionError):
                part = self._process.channel.recv(size - len(received))
            if not part:
                code = self._process.popen.wait()
                with _lock:
                    if self._process in _running:
                        _running.remove(self._process)
                how = f"was ended by signal {-code}" if code < 0 else f"left with status {code}"
                raise ModelLoadError(f"The process that converts the model {how}.")
            received += part
        return bytes(received)


_decoder: "msgspec.msgpack.Decoder[FromConversion]" = msgspec.msgpack.Decoder(FromConversion)

"""A process that converts a model for this one, from a thread that loads models."""

import logging
import socket
import subprocess
import sys
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
    Loaded,
    LogLine,
)
from trio_pool_serve.processes.framed_stream import PREFIX
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel

T = TypeVar("T")

MODULE = "trio_pool_serve.models.loading.conversion_process"


@define(eq=False)
class ConversionChild:
    """A process that has a model loaded by torch. It ends with this process, however that ends, and when closed."""

    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _socket: socket.socket = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours may be a table's
                pass_fds=[theirs.fileno()],
            )

    def __del__(self) -> None:
        """End a process that nobody has closed: its model was not needed after all."""
        self.close()

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def load(self, job: ConversionJob) -> None:
        """Load the model. Blocks for seconds. Raises ``ModelLoadError``, also if the process dies."""
        self._send(job)
        self._receive(Loaded)

    def convert(self, folder: Path) -> ConvertedModel:
        """Write the conversion to an empty folder; return its record. Blocks for seconds to minutes.

        Raises ``OSError`` if the folder cannot be written, and ``ModelLoadError`` if the process dies.
        """
        self._send(Convert(str(folder)))
        return self._receive(Converted).model

    def _send(self, message: ConversionJob | Convert) -> None:
        header = msgspec.msgpack.encode(message)
        with suppress(ConnectionError):  # it has ended, as ``_receive`` will tell
            self._socket.sendall(PREFIX.pack(len(header), 0) + header)

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
                part = self._socket.recv(size - len(received))
            if not part:
                assert self._process is not None  # noqa: S101
                code = self._process.wait()
                how = f"was ended by signal {-code}" if code < 0 else f"left with status {code}"
                raise ModelLoadError(f"The process that converts the model {how}.")
            received += part
        return bytes(received)


_decoder: "msgspec.msgpack.Decoder[FromConversion]" = msgspec.msgpack.Decoder(FromConversion)

"""Messages between processes of one server: length-framed, msgpack in front, raw arrays behind.

A frame is two little-endian integers (bytes of the header, uint32; bytes of the payload, uint64), the header, and the
payload. Nothing is pickled: a process that can write to a socket cannot have code run at its other end.
"""

import logging
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.errors import UnsendableError

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

Buffer: TypeAlias = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IQ")

JOINED_BELOW = 64 * 1024
"""Bytes: smaller frames are sent by one call, of larger ones nothing is copied."""

CHUNK = 64 * 1024

MAX_HEADER_BYTES = 64 * 2**20
"""A row takes some hundred bytes of a header."""

MAX_PAYLOAD_BYTES = 4 * 2**30
"""The largest image of a Qwen-VL model makes 300 MB, and one input may have 16 images."""

MAX_TEXT = 4000
"""Characters of a message for people."""

FAILURES_TO_ENCODE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What msgspec raises for an object that msgpack has no form for: UnicodeError is a ValueError."""

FAILURES_TO_DECODE = (ValueError, RecursionError, msgspec.MsgspecError)


def sendable(text: str) -> str:
    """Return a message for people as it can be sent: of bounded length, and without lone surrogates."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


@define(eq=False)
class FramedStream(Generic[Message]):
    """Sends and receives messages, each with any number of buffers behind it.

    ``kind`` is the type of the messages that are received, a tagged union of msgspec structs. One task may send and
    another receive at the same time.
    """

    stream: trio.SocketStream
    kind: Any
    _decoder: msgspec.msgpack.Decoder[Message] = field(init=False)
    _received: bytearray = field(init=False, factory=bytearray)

    def __attrs_post_init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(self.kind)

    async def send(self, message: object, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message. Raises ``trio.BrokenResourceError`` if the other end is closed.

        Raises ``UnsendableError``, before a byte is sent, for a message that has no form in msgpack or is too large.
        Cancellation: at once; half a frame may have been sent then, and the stream is of no use any more.
        """
        try:
            header = msgspec.msgpack.encode(message)
        except FAILURES_TO_ENCODE as error:
            raise UnsendableError(f"This cannot be sent between processes: {error}") from error
        payload = sum(map(len, buffers))
        if len(header) > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
            raise UnsendableError(f"This is too large to be sent between processes: {len(header) + payload} bytes.")
        prefix = PREFIX.pack(len(header), payload)
        if payload < JOINED_BELOW:
            await self.stream.send_all(b"".join([prefix, header, *buffers]))
            return
        await self.stream.send_all(prefix + header)
        for buffer in buffers:
            await self.stream.send_all(buffer)

    async def receive(self) -> tuple[Message, memoryview] | None:
        """Return the next message and its payload; ``None`` if the other end is gone, in the middle of a frame too.

        ``None`` also, and a warning in the log, if what arrives is no frame: nothing behind it can be understood.
        Cancellation: at once; nothing that has arrived is lost.
        """
        if not await self._has(PREFIX.size):
            return None
        header, payload = PREFIX.unpack_from(self._received)
        if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
            logger.warning("a connection between processes ends: a frame of %d and %d bytes", header, payload)
            return None
        begin = PREFIX.size + header
        if payload < JOINED_BELOW:
            if not await self._has(begin + payload):
                return None
            behind = memoryview(self._received[begin : begin + payload])
        else:
            if not await self._has(begin):
                return None
            whole = await self._large(begin, payload)
            if whole is None:
                return None
            behind = whole
        try:
            # A copy: the message may keep parts of it undecoded.
            message = self._decoder.decode(bytes(memoryview(self._received)[PREFIX.size : begin]))
        except FAILURES_TO_DECODE as error:
            logger.warning("a connection between processes ends: a frame that is none: %s", sendable(str(error)))
            return None
        del self._received[: begin + payload]
        return message, behind

    async def _has(self, length: int) -> bool:
        """Receive until so many bytes are there; False if they never will be."""
        while len(self._received) < length:
            try:
                received = await self.stream.receive_some(CHUNK)
            except trio.BrokenResourceError:
                return False
            if not received:
                return False
            self._received += received
        return True

    async def _large(self, begin: int, length: int) -> memoryview | None:
        """Return a large payload, received where it will stay."""
        whole = memoryview(np.empty(length, np.uint8))  # type: ignore[arg-type]  # takes memory as it is written to
        filled = min(length, len(self._received) - begin)
        whole[:filled] = memoryview(self._received)[begin : begin + filled]
        while filled < length:
            try:
                received = await self.stream.socket.recv_into(whole[filled:])
            except OSError:
                return None
            if not received:
                return None
            filled += received
        return whole

    async def aclose(self) -> None:
        """Close the connection. Cancellation: it is closed all the same."""
        await self.stream.aclose()

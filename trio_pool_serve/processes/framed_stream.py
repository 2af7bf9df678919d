"""Framed messages between processes of one server.

A frame is two little-endian integers (header bytes, uint32; payload bytes, uint64), the header (a message in msgpack),
and the payload (raw arrays). Nothing is pickled: a process that can write to a socket cannot run code in the receiver.
"""

import errno
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import trio
from attrs import Factory, define, field

from trio_pool_serve.errors import UnsendableError

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

Buffer: TypeAlias = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IQ")

JOINED_BYTES = 2**20
"""Buffers are joined into pieces of up to this many bytes, each sent by one call. One MiB of vectors of 384 float32
took 0.61 ms of CPU time in one piece, 0.73 in pieces of 256 KiB, 1.2 in pieces of 64 KiB, and 25 one by one."""

ALONE_FROM = 256 * 1024
"""Buffers of at least this many bytes are sent alone, without a copy; smaller ones took longer that way."""

CHUNK = 64 * 1024
"""Bytes of one read. Larger payloads are received into memory of their own."""

MAX_HEADER_BYTES = 64 * 2**20
"""A row takes a few hundred bytes of a header."""

MAX_PAYLOAD_BYTES = 4 * 2**30
"""The largest image of a Qwen-VL model makes 300 MB, and one input may have 16 images."""

MAX_TEXT = 4000
"""Characters of an error message or description."""


def sendable(text: str) -> str:
    """Return the text as it can be sent: truncated to ``MAX_TEXT``, without lone surrogates."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def joined(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the bytes of the buffers in order, in as few pieces as ``JOINED_BYTES`` and ``ALONE_FROM`` allow."""
    small: list[Buffer] = []
    nbytes = 0
    for buffer in buffers:
        if small and (len(buffer) >= ALONE_FROM or nbytes + len(buffer) > JOINED_BYTES):
            yield b"".join(small)
            small, nbytes = [], 0
        if len(buffer) >= ALONE_FROM:
            yield buffer
        else:
            small.append(buffer)
            nbytes += len(buffer)
    if small:
        yield b"".join(small)


@define(eq=False)
class FramedStream(Generic[Message]):
    """Sends and receives messages, each with a payload of any number of buffers.

    ``kind`` is the type of received messages, a tagged union of msgspec structs. Frames with more than
    ``max_header_bytes`` and ``max_payload_bytes`` are not received. One task may send while another receives.
    """

    stream: trio.SocketStream
    kind: Any
    max_header_bytes: int = MAX_HEADER_BYTES
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    logs_invalid_frames: bool = True
    invalid_frame: str = field(default="", init=False)
    """Description of the invalid frame that ended the stream; empty if there was none."""
    received_bytes: int = field(default=0, init=False)
    """Total, incomplete frames included."""
    sent_bytes: int = field(default=0, init=False)
    """Total that the kernel has taken, frames being sent included."""
    _decoder: msgspec.msgpack.Decoder[Message] = field(
        init=False, default=Factory(lambda self: msgspec.msgpack.Decoder(self.kind), takes_self=True)
    )
    _received: bytearray = field(init=False, factory=bytearray)

    def continued(self, kind: Any) -> "FramedStream[Any]":
        """Return the same stream for messages of another type and the default sizes; do not use this one afterwards."""
        stream = FramedStream[Any](self.stream, kind)
        stream._received = self._received
        return stream

    async def send(self, message: object, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message. Raises ``trio.BrokenResourceError`` if the other end is closed.

        Raises ``UnsendableError``, before a byte is sent, for a message that cannot be encoded or is too large.
        Cancellation: at once; part of a frame may have been sent, and the stream is unusable afterwards.
        """
        try:
            header = msgspec.msgpack.encode(message)
        # For objects that msgpack cannot represent; UnicodeError is a ValueError.
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise UnsendableError(f"This cannot be sent between processes: {error}") from error
        payload = sum(map(len, buffers))
        if len(header) > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
            raise UnsendableError(f"This is too large to be sent between processes: {len(header) + payload} bytes.")
        for piece in joined([PREFIX.pack(len(header), payload), header, *buffers]):
            await self._send_all(memoryview(piece))

    async def _send_all(self, piece: memoryview) -> None:
        """Send bytes, and count them as the kernel takes them."""
        while piece:
            try:
                sent = await self.stream.socket.send(piece)
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise trio.ClosedResourceError("this end was closed") from error
                raise trio.BrokenResourceError(f"the connection ended: {error}") from error
            self.sent_bytes += sent
            piece = piece[sent:]

    async def receive(self) -> tuple[Message, memoryview] | None:
        """Return the next message and its payload; ``None`` at the end of the stream, even within a frame.

        Also return ``None`` for an invalid frame, described by ``invalid_frame`` and, with ``logs_invalid_frames``,
        logged as a warning: the bytes after it cannot be decoded either. Cancellation: at once; within a large frame,
        the stream is unusable afterwards.
        """
        if self._received:
            await trio.lowlevel.checkpoint()  # thousands of messages may have arrived at once
        if not await self._has(PREFIX.size):
            return None
        header, payload = PREFIX.unpack_from(self._received)
        if header > self.max_header_bytes or payload > self.max_payload_bytes:
            self._end(f"a frame of {header} and {payload} bytes")
            return None
        begin = PREFIX.size + header
        is_small = payload < CHUNK
        if not await self._has(begin + payload if is_small else begin):
            return None
        arrays = memoryview(self._received[begin : begin + payload]) if is_small else await self._large(begin, payload)
        if arrays is None:
            return None
        try:
            # A copy: the message may keep parts of it undecoded.
            message = self._decoder.decode(bytes(memoryview(self._received)[PREFIX.size : begin]))
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._end(f"an invalid frame: {sendable(str(error))}")
            return None
        del self._received[: begin + payload]
        return message, arrays

    def _end(self, invalid_frame: str) -> None:
        self.invalid_frame = invalid_frame
        if self.logs_invalid_frames:
            logger.warning("a connection between processes ends: %s", invalid_frame)

    async def _has(self, length: int) -> bool:
        """Receive until ``length`` bytes have arrived; return ``False`` if the stream ends first."""
        while len(self._received) < length:
            try:
                received = await self.stream.receive_some(CHUNK)
            except trio.BrokenResourceError:
                return False
            if not received:
                return False
            self._received += received
            self.received_bytes += len(received)
        return True

    async def _large(self, begin: int, length: int) -> memoryview | None:
        """Return a large payload, received without a copy."""
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
            self.received_bytes += received
        return whole

    async def aclose(self) -> None:
        """Close the connection. Cancellation: it is closed all the same."""
        await self.stream.aclose()

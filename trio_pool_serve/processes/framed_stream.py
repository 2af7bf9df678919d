"""Messages between processes of one server: length-framed, msgpack in front, raw arrays behind.

A frame is two little-endian integers (bytes of the header, uint32; bytes of the payload, uint64), the header, and the
payload. Nothing is pickled: whoever could write to a socket could not have code run at its other end.
"""

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import trio
from attrs import define, field

Message = TypeVar("Message")

Buffer: TypeAlias = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IQ")

JOINED_BELOW = 64 * 1024
"""Bytes: smaller frames are sent by one call, of larger ones nothing is copied."""

CHUNK = 64 * 1024


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
        """Send a message. Raises ``trio.BrokenResourceError`` if nobody is at the other end.

        Cancellation: at once; half a frame may have been sent then, and the stream is of no use any more.
        """
        header = msgspec.msgpack.encode(message)
        payload = sum(map(len, buffers))
        prefix = PREFIX.pack(len(header), payload)
        if payload < JOINED_BELOW:
            await self.stream.send_all(b"".join([prefix, header, *buffers]))
            return
        await self.stream.send_all(prefix + header)
        for buffer in buffers:
            await self.stream.send_all(buffer)

    async def receive(self) -> tuple[Message, memoryview] | None:
        """Return the next message and its payload; ``None`` if the other end is gone, in the middle of a frame too.

        Cancellation: at once; nothing that has arrived is lost.
        """
        if not await self._has(PREFIX.size):
            return None
        header, payload = PREFIX.unpack_from(self._received)
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
        message = self._decoder.decode(memoryview(self._received)[PREFIX.size : begin])
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
        whole = memoryview(bytearray(length))
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

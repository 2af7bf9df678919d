import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_pool_serve.processes.framed_stream import JOINED_BELOW, FramedStream


class Note(msgspec.Struct, tag=True, array_like=True):
    text: str


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FramedStream[Note], FramedStream[Note]]]:
    left, right = trio.socket.socketpair()
    async with trio.SocketStream(left) as ours, trio.SocketStream(right) as theirs:
        yield FramedStream(ours, Note), FramedStream(theirs, Note)


async def send_all(stream: FramedStream[Any], frames: list[tuple[str, list[bytes]]]) -> None:
    for text, buffers in frames:
        await stream.send(Note(text), buffers)
    await stream.aclose()


async def received(stream: FramedStream[Any]) -> list[tuple[str, bytes]]:
    found = []
    while (one := await stream.receive()) is not None:
        message, payload = one
        found.append((message.text, bytes(payload)))
    return found


BUFFERS = st.lists(st.binary(max_size=50) | st.integers(0, 3 * JOINED_BELOW).map(bytes), max_size=4)


@given(frames=st.lists(st.tuples(st.text(max_size=20), BUFFERS), max_size=6))
def test_frames_arrive_as_they_were_sent(frames):
    async def main() -> None:
        async with pair() as (ours, theirs), trio.open_nursery() as nursery:
            nursery.start_soon(send_all, ours, frames)
            assert await received(theirs) == [(text, b"".join(buffers)) for text, buffers in frames]

    trio.run(main)


async def test_a_frame_that_comes_byte_by_byte_is_whole_in_the_end():
    header = msgspec.msgpack.encode(Note("slow"))
    frame = struct.pack("<IQ", len(header), 3) + header + b"abc"

    async def dribble(stream: trio.SocketStream) -> None:
        for byte in frame:
            await stream.send_all(bytes([byte]))
            await trio.lowlevel.checkpoint()

    async with pair() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(dribble, ours.stream)
        message, payload = await theirs.receive()
    assert (message, bytes(payload)) == (Note("slow"), b"abc")


@pytest.mark.parametrize("payload", [10, 2 * JOINED_BELOW])
async def test_an_end_in_the_middle_of_a_frame_is_the_end(payload):
    header = msgspec.msgpack.encode(Note("cut"))
    frame = struct.pack("<IQ", len(header), payload) + header + bytes(payload)
    async with pair() as (ours, theirs):
        await ours.stream.send_all(frame[:-1])
        await ours.aclose()
        assert await theirs.receive() is None


async def test_arrays_of_a_payload_can_be_written_to():
    """torch warns of arrays that cannot."""
    for size in (4, JOINED_BELOW):
        async with pair() as (ours, theirs), trio.open_nursery() as nursery:
            nursery.start_soon(ours.send, Note("x"), [np.arange(size, dtype=np.int32).tobytes()])
            _, payload = await theirs.receive()
        array = np.frombuffer(payload, np.int32)
        assert array.flags.writeable
        assert array.tolist() == list(range(size))


async def test_receiving_can_be_cancelled_between_frames_and_goes_on_where_it_was():
    async with pair() as (ours, theirs):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(theirs.receive)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        await ours.send(Note("still there"))
        message, _ = await theirs.receive()
        assert message == Note("still there")

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import trio
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st

from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import (
    ALONE_FROM,
    CHUNK,
    JOINED_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FramedStream,
    joined,
)

pytestmark = pytest.mark.unit


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


def framed(header: bytes, payload: int = 0) -> bytes:
    return struct.pack("<IQ", len(header), payload) + header


SIZES = st.integers(0, 50) | st.integers(0, 2 * CHUNK) | st.integers(0, 2 * ALONE_FROM)

BUFFERS = st.lists(st.binary(max_size=50) | SIZES.map(bytes), max_size=4)


@given(frames=st.lists(st.tuples(st.text(max_size=20), BUFFERS), max_size=6))
def test_frames_arrive_as_they_were_sent(frames):
    async def main() -> None:
        async with pair() as (ours, theirs), trio.open_nursery() as nursery:
            nursery.start_soon(send_all, ours, frames)
            assert await received(theirs) == [(text, b"".join(buffers)) for text, buffers in frames]

    trio.run(main)


@example([ALONE_FROM - 1] * 12)
@given(st.lists(st.integers(0, 2 * ALONE_FROM), max_size=12))
def test_buffers_are_joined_up_to_a_mebibyte_and_large_ones_are_not_copied(sizes):
    buffers = [bytes([index]) * size for index, size in enumerate(sizes)]
    pieces = list(joined(buffers))
    assert b"".join(pieces) == b"".join(buffers)
    large = [buffer for buffer in buffers if len(buffer) >= ALONE_FROM]
    assert [id(piece) for piece in pieces if any(piece is buffer for buffer in large)] == list(map(id, large))
    small = [len(piece) for piece in pieces if not any(piece is buffer for buffer in large)]
    assert max(small, default=0) <= JOINED_BYTES
    if not large:
        assert len(small) <= sum(sizes) // (JOINED_BYTES - ALONE_FROM) + 1


async def test_a_frame_that_comes_byte_by_byte_is_whole_in_the_end():
    frame = framed(msgspec.msgpack.encode(Note("slow")), 3) + b"abc"

    async def dribble(stream: trio.SocketStream) -> None:
        for byte in frame:
            await stream.send_all(bytes([byte]))
            await trio.lowlevel.checkpoint()

    async with pair() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(dribble, ours.stream)
        message, payload = await theirs.receive()
    assert (message, bytes(payload)) == (Note("slow"), b"abc")


@pytest.mark.parametrize("payload", [10, 2 * CHUNK])
async def test_an_end_in_the_middle_of_a_frame_is_the_end(payload):
    frame = framed(msgspec.msgpack.encode(Note("cut")), payload) + bytes(payload)
    async with pair() as (ours, theirs):
        await ours.stream.send_all(frame[:-1])
        await ours.aclose()
        assert await theirs.receive() is None


async def test_arrays_of_a_payload_can_be_written_to():
    """torch warns of arrays that cannot."""
    for size in (4, CHUNK):
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


# -- what is no frame ------------------------------------------------------------------------------------


async def test_an_unencodable_message_is_refused_before_a_byte_is_sent():
    endless: list = []
    endless.append(endless)
    async with pair() as (ours, theirs):
        for wrong in (2**64, "a\ud800", object(), endless, {1: object()}):
            with pytest.raises(UnsendableError):
                await ours.send(wrong)
        await ours.send(Note("still there"))
        assert (await theirs.receive())[0] == Note("still there")


async def test_a_message_that_is_too_large_is_refused_before_a_byte_is_sent(monkeypatch):
    monkeypatch.setattr("trio_pool_serve.processes.framed_stream.MAX_HEADER_BYTES", 100)
    monkeypatch.setattr("trio_pool_serve.processes.framed_stream.MAX_PAYLOAD_BYTES", 100)
    async with pair() as (ours, theirs):
        for text, payload in (("a" * 101, b""), ("a", bytes(101))):
            with pytest.raises(UnsendableError, match="too large"):
                await ours.send(Note(text), [payload])
        await ours.send(Note("fits"), [bytes(100)])
        assert (await theirs.receive())[0] == Note("fits")


NO_FRAMES = {
    "noise": b"\xc1" * 50,
    "a header that is too long": struct.pack("<IQ", MAX_HEADER_BYTES + 1, 0),
    "a payload that is too long": struct.pack("<IQ", 0, MAX_PAYLOAD_BYTES + 1),
    "an empty header": framed(b""),
    "another message": framed(msgspec.msgpack.encode(["Other", "x"])),
    "a field of another type": framed(msgspec.msgpack.encode(["Note", 5])),
    "bytes that are no text": framed(b"\x92\xa4Note\xa1\xff"),
    "very deep": framed(b"\x92\xa4Note" + b"\x91" * 100_000),
}


@pytest.mark.parametrize("wrong", NO_FRAMES.values(), ids=NO_FRAMES)
async def test_an_invalid_frame_ends_the_stream(wrong, caplog):
    async with pair() as (ours, theirs):
        await ours.send(Note("good"))
        await ours.stream.send_all(wrong)
        assert (await theirs.receive())[0] == Note("good")
        assert await theirs.receive() is None
        assert await theirs.receive() is None, "nothing behind it can be understood"
    assert "a connection between processes ends" in caplog.text


@given(st.binary(max_size=200))
def test_no_bytes_raise(noise):
    async def main() -> None:
        async with pair() as (ours, theirs):
            await ours.stream.send_all(noise)
            await ours.aclose()
            await received(theirs)

    trio.run(main)


async def test_an_announced_payload_takes_no_memory_before_it_comes():
    async with pair() as (ours, theirs), trio.open_nursery() as nursery:
        before = psutil.Process().memory_info().rss
        await ours.stream.send_all(struct.pack("<IQ", 0, MAX_PAYLOAD_BYTES))
        nursery.start_soon(theirs.receive)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert psutil.Process().memory_info().rss - before < 2**30
        nursery.cancel_scope.cancel()

"""HTTP responses: bytes, a stream of server-sent events, or a file."""

import math
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

import msgspec
import trio
from attrs import define

from trio_pool_serve.storage.durable_files import storage_errors
from trio_pool_serve.threads.offload import Offload

ResponseBody: TypeAlias = AbstractAsyncContextManager[AsyncIterable[bytes | str]]
"""A body that is entered and iterated while it is sent, as Quart's own are."""

Emit: TypeAlias = Callable[[Callable[[], object]], None]
"""Queues an event, whose data its argument returns; never waits. The argument is called when the event is about to be
sent, so that events that come all at once are not encoded all at once."""

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


@define(eq=False)
class HttpResponse:
    """The response to one request: all of its bytes, or a body that is entered and iterated while it is sent.

    A ``content_type`` of ``None`` is among the headers, or absent.
    """

    body: bytes | ResponseBody
    content_type: str | None = "application/json"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def events(cls, body: bytes | ResponseBody) -> Self:
        """Return a response of server-sent events, which no proxy keeps: nginx and others honour the headers."""
        return cls(body, "text/event-stream", headers=(("cache-control", "no-store"), ("x-accel-buffering", "no")))

    @classmethod
    def json(cls, value: object, status: int = 200) -> Self:
        """Return a response with a JSON body; msgspec must be able to encode ``value``."""
        return cls(msgspec.json.encode(value), status=status)

    def with_headers(self, headers: Mapping[str, str]) -> Self:
        """Return the same response with more headers."""
        return type(self)(self.body, self.content_type, self.status, (*self.headers, *headers.items()))

    def encoded_headers(self) -> list[tuple[bytes, bytes]]:
        """Return all headers as ASGI has them."""
        headers = [(name.lower().encode(), value.encode("latin1")) for name, value in self.headers]
        if self.content_type is not None:
            headers.append((b"content-type", self.content_type.encode()))
        if isinstance(self.body, bytes):
            headers.append((b"content-length", b"%d" % len(self.body)))
        return headers

    async def send(self, send: Any) -> None:
        """Send the response as ASGI messages. Cancellation: a stream ends at once; otherwise as the server's ``send``.

        ``send`` is the ASGI server's.
        """
        body = self.body
        start = {"type": "http.response.start", "status": self.status, "headers": self.encoded_headers()}
        if isinstance(body, bytes):
            await send(start)
        else:
            async with body as parts:  # first: its resources must be released, whatever happens
                await send(start)
                async for part in parts:
                    data = part if isinstance(part, bytes) else part.encode()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            body = b""
        await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def event_stream(produce: Callable[[Emit], Awaitable[None]]) -> AsyncIterator[AsyncIterator[bytes]]:
    """Return a body of server-sent events, produced by a child task while earlier ones are sent.

    ``produce(emit)`` runs in a nursery that lives as long as the body is being sent: when the client disconnects, it is
    cancelled. It handles its own errors, and bounds the events that it emits: these are kept until they are sent.
    """
    emitted, unsent = trio.open_memory_channel[Callable[[], object]](math.inf)

    async def produce_all() -> None:
        with emitted:
            await produce(emitted.send_nowait)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce_all)
        async with aclosing(_encoded(unsent)) as events:
            yield events
        nursery.cancel_scope.cancel(reason="the stream has ended")


async def _encoded(unsent: trio.MemoryReceiveChannel[Callable[[], object]]) -> AsyncGenerator[bytes, None]:
    async for event in unsent:
        yield b"data: " + msgspec.json.encode(event()) + b"\n\n"
    yield DONE


PIECE_BYTES = 256 * 1024

RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
"""One range; requests for several get the whole file, as RFC 9110 allows."""


@asynccontextmanager
async def _file_body(path: Path, begin: int, end: int, offload: Offload) -> AsyncIterator[AsyncIterator[bytes]]:
    """Return the bytes of a file from one offset to another, read in threads as they are sent."""
    with storage_errors(path):
        file = await offload.run("files", lambda: path.open("rb"))
    with file:
        file.seek(begin)
        async with aclosing(_pieces(file, end - begin, offload)) as pieces:
            yield pieces


async def _pieces(file: BinaryIO, left: int, offload: Offload) -> AsyncGenerator[bytes, None]:
    while left and (data := await offload.run("files", partial(file.read, min(PIECE_BYTES, left)))):
        left -= len(data)
        yield data


def file_response(path: Path, size: int, offload: Offload, *, byte_range: str, is_head: bool) -> HttpResponse:
    """Return a file of ``size`` bytes, or the part that a ``Range`` header asks for: 206, or 416."""
    begin, end, status = 0, size, 200
    headers = [("accept-ranges", "bytes")]
    asked = RANGE.fullmatch(byte_range)
    first, last = asked.groups() if asked is not None else ("", "")
    if (first or last) and not (first and last and int(last) < int(first)):
        begin = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if begin >= end:
            error = {"message": f"The file has {size} bytes.", "type": "RangeError", "param": "range", "code": 416}
            return HttpResponse.json({"error": error}, 416).with_headers({"content-range": f"bytes */{size}"})
        status = 206
        headers.append(("content-range", f"bytes {begin}-{end - 1}/{size}"))
    headers.append(("content-length", str(end - begin)))
    return HttpResponse(
        _file_body(path, begin, begin if is_head else end, offload),
        "application/octet-stream",
        status,
        tuple(headers),
    )

"""HTTP responses: bytes, or a stream of server-sent events."""

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec
import trio
from attrs import frozen
from quart.wrappers.response import ResponseBody

Emit: TypeAlias = Callable[[Callable[[], object]], None]
"""Queues an event, whose data its argument returns; never waits. The argument is called when the event is about to be
sent, so that events that come all at once are not encoded all at once."""

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


@frozen(eq=False)
class HttpResponse:
    """The response to one request: all of its bytes, or a body that is entered and iterated while it is sent.

    A ``content_type`` of ``None`` is among the headers, or absent.
    """

    body: bytes | ResponseBody
    content_type: str | None = "application/json"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()

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
            async with body as parts:  # first: what it holds must be let go of, whatever happens
                await send(start)
                async for part in parts:
                    data = part if isinstance(part, bytes) else part.encode()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            body = b""
        await send({"type": "http.response.body", "body": body, "more_body": False})


class EventStream(ResponseBody):
    """A body of server-sent events, produced by a child task while earlier ones are sent.

    ``produce(emit)`` runs in a nursery that lives as long as the body is being sent: when the client disconnects, it is
    cancelled. It handles its own errors, and bounds what it emits: events are kept until they are sent.
    """

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        self._produce = produce
        self._emitted, self._unsent = trio.open_memory_channel[Callable[[], object]](math.inf)
        self._nursery: AbstractAsyncContextManager[trio.Nursery] = trio.open_nursery()
        self._scope = trio.CancelScope()
        self._ended = False

    async def __aenter__(self) -> Self:
        nursery = await self._nursery.__aenter__()
        self._scope = nursery.cancel_scope
        nursery.start_soon(self._run)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            event = await self._unsent.receive()
        except trio.EndOfChannel:
            if self._ended:
                raise StopAsyncIteration from None
            self._ended = True
            return DONE
        return b"data: " + msgspec.json.encode(event()) + b"\n\n"

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._scope.cancel(reason="the stream has ended")
        await self._nursery.__aexit__(exc_type, exc_value, tb)

    async def _run(self) -> None:
        with self._emitted:
            await self._produce(self._emitted.send_nowait)

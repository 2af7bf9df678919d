"""Answers that go out piece by piece, as server-sent events."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import msgspec
import trio
from quart.wrappers.response import ResponseBody

Emit = Callable[[Callable[[], object]], None]
"""Sends what its argument returns, as JSON, as soon as the client reads; never waits. It is called only then, so
that events that come all at once are not encoded all at once."""

DONE = b"data: [DONE]\n\n"
"""What OpenAI's streams end with."""


class EventStream(ResponseBody):
    """A body whose events a child task makes while earlier ones are sent.

    ``produce(emit)`` runs in a nursery that lives as long as the body is being sent: a client that leaves
    cancels it. It deals with its own errors. What it emits is kept until it is sent, so it bounds that itself.
    """

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        self._produce = produce
        self._events, self._sent = trio.open_memory_channel[Callable[[], object]](math.inf)
        self._nursery: AbstractAsyncContextManager[trio.Nursery] = trio.open_nursery()
        self._scope = trio.CancelScope()
        self._ended = False

    async def __aenter__(self) -> Self:
        nursery = await self._nursery.__aenter__()
        self._scope = nursery.cancel_scope
        nursery.start_soon(self._run)
        return self

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            event = await self._sent.receive()
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
        with self._events:
            await self._produce(self._events.send_nowait)

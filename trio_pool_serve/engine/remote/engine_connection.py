"""The engine's end of the wire: rows of any number of connections into one engine, and their answers back."""

import logging

import trio
from attrs import define, field

from trio_pool_serve.engine.local import LocalEngine
from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.engine.remote.arrays import Payload
from trio_pool_serve.engine.remote.wire import (
    Answers,
    CloseScope,
    Frame,
    Hello,
    Part,
    Scopes,
    Submit,
    ToEngine,
    Withdraw,
    add_answer,
    parts_of,
    read_row,
)
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput

logger = logging.getLogger(__name__)


@define(eq=False)
class EngineConnection:
    """One process that has rows computed. What it waited for leaves the queue with it.

    Its exceptions end nothing but itself, and what is wrong with one row fails that row alone.
    """

    engine: LocalEngine
    stream: FramedStream[ToEngine]
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _number_of: dict[QueueEntry, int] = field(init=False, factory=dict)
    _done: list[tuple[int, PoolingOutput | Exception]] = field(init=False, factory=list)
    _some_done: trio.Event = field(init=False, factory=trio.Event)
    _scopes: Scopes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._scopes = Scopes(lambda: self.engine.runner.open_scope())  # type: ignore[union-attr]

    async def serve(self) -> None:
        """Serve until the other end is gone. Cancellation: at once; its rows leave the queue."""
        try:
            await self.stream.send(Hello(self.engine.dimensions, self.engine.embeds_width))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                await self._receive()
                nursery.cancel_scope.cancel(reason="the other end is gone")
        except* trio.BrokenResourceError:
            logger.info("an API process has left in the middle of an answer")
        except* Exception:
            logger.exception("the connection of an API process failed")
        finally:
            for entry in list(self._waiting.values()):
                self.engine.withdraw(entry)
            self._scopes.close_all()
            await self.stream.aclose()

    async def _receive(self) -> None:
        while (received := await self.stream.receive()) is not None:
            message, behind = received
            match message:
                case Submit(rows):
                    for part, payload in parts_of(rows, behind):
                        self._submit(part, payload)
                case Withdraw(ids):
                    for number in ids:
                        entry = self._waiting.pop(number, None)
                        if entry is not None:
                            del self._number_of[entry]
                            self.engine.withdraw(entry)
                case CloseScope(scope):
                    self._scopes.close(scope)

    def _submit(self, part: Part, payload: Payload) -> None:
        try:
            request = read_row(part, payload, self._scopes)
        except UnsendableError as error:
            self._finish(part.id, error)
            return
        # No task waits for the row: its answer goes on the wire.
        entry = QueueEntry(request, self._settled)
        self._waiting[part.id] = entry
        self._number_of[entry] = part.id
        try:
            self.engine.submit_nowait(entry)
        except Exception as error:
            entry.fail(error)

    def _settled(self, entry: QueueEntry) -> None:
        number = self._number_of.pop(entry, None)
        if number is not None:  # else it was withdrawn after it had been launched
            self._waiting.pop(number, None)
            outcome = entry.output or entry.error
            assert outcome is not None  # noqa: S101  (it is settled)
            self._finish(number, outcome)

    def _finish(self, number: int, outcome: PoolingOutput | Exception) -> None:
        self._done.append((number, outcome))
        self._some_done.set()

    async def _answer(self) -> None:
        """Send whatever is done, and what gets done meanwhile in one frame after it."""
        while True:
            await self._some_done.wait()
            self._some_done = trio.Event()
            done, self._done = self._done, []
            frame = Frame()
            for number, outcome in done:
                add_answer(frame, number, outcome)
                if frame.is_full:
                    await self._send(frame)
                    frame = Frame()
            if frame.parts:
                await self._send(frame)

    async def _send(self, frame: Frame) -> None:
        busy = self.engine.waiting_tokens, self.engine.tokens_per_s
        await self.stream.send(Answers(frame.parts, *busy), frame.buffers)


async def serve_engine(engine: LocalEngine, listener: trio.SocketListener) -> None:
    """Serve all connections, for ever. Cancellation: at once, connections included."""

    async def serve(stream: trio.SocketStream) -> None:
        await EngineConnection(engine, FramedStream(stream, ToEngine)).serve()

    await trio.serve_listeners(serve, [listener])

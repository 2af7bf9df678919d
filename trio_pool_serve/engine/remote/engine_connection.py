"""The engine's end of the wire: rows of any number of connections into one engine, and their answers back."""

import logging

import trio
from attrs import define, field

from trio_pool_serve.engine.local import LocalEngine
from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.engine.remote.wire import (
    Answer,
    Answers,
    CloseScope,
    Failure,
    Hello,
    Payload,
    Scopes,
    Submit,
    ToEngine,
    Withdraw,
    failure_of,
    read_rows,
    write_value,
)
from trio_pool_serve.errors import PoolServeError
from trio_pool_serve.processes.framed_stream import Buffer, FramedStream

logger = logging.getLogger(__name__)


@define(eq=False)
class EngineConnection:
    """One process that asks. What it waited for leaves the queue with it."""

    engine: LocalEngine
    stream: FramedStream[ToEngine]
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _number_of: dict[QueueEntry, int] = field(init=False, factory=dict)
    _done: list[tuple[int, QueueEntry]] = field(init=False, factory=list)
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
        finally:
            for entry in list(self._waiting.values()):
                self.engine.withdraw(entry)
            self._scopes.close_all()
            await self.stream.aclose()

    async def _receive(self) -> None:
        while (received := await self.stream.receive()) is not None:
            message, behind = received
            match message:
                case Submit():
                    self._submit(message, Payload(behind))
                case Withdraw(ids):
                    for number in ids:
                        entry = self._waiting.pop(number, None)
                        if entry is not None:
                            del self._number_of[entry]
                            self.engine.withdraw(entry)
                case CloseScope(scope):
                    self._scopes.close(scope)

    def _submit(self, message: Submit, payload: Payload) -> None:
        for number, request in read_rows(message, payload, self._scopes):
            # No task waits for the row: its answer goes on the wire.
            entry = self._waiting[number] = QueueEntry(request, self._settled)
            self._number_of[entry] = number
            try:
                self.engine.submit_nowait(entry)
            except PoolServeError as error:
                entry.fail(error)

    def _settled(self, entry: QueueEntry) -> None:
        number = self._number_of.pop(entry, None)
        if number is not None:  # else it was withdrawn after it had been launched
            del self._waiting[number]
            self._done.append((number, entry))
            self._some_done.set()

    async def _answer(self) -> None:
        """Send whatever is done, and what gets done meanwhile in one frame after it."""
        while True:
            await self._some_done.wait()
            self._some_done = trio.Event()
            done, self._done = self._done, []
            rows: list[Answer] = []
            failures: list[Failure] = []
            buffers: list[Buffer] = []
            for number, entry in done:
                output = entry.output
                if output is None:
                    failures.append(failure_of(number, entry.error))
                    continue
                values = [write_value(value, buffers) for value in output.values]
                rows.append(Answer(number, output.queue_s, output.forward_s, output.copy_s, values))
            busy = self.engine.waiting_tokens, self.engine.tokens_per_s
            await self.stream.send(Answers(rows, failures, *busy), buffers)


async def serve_engine(engine: LocalEngine, listener: trio.SocketListener) -> None:
    """Serve whoever connects, for ever. Cancellation: at once, connections included."""

    async def serve(stream: trio.SocketStream) -> None:
        await EngineConnection(engine, FramedStream(stream, ToEngine)).serve()

    await trio.serve_listeners(serve, [listener])

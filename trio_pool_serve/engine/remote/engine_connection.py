"""The server side of an engine process: connections of API processes, whose rows one engine computes."""

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

HEARTBEAT_S = 1.0
"""Longest pause between two messages to an API process."""

HEARTBEATS_IN_STALL_TIMEOUT = 4
"""At least so many are sent within ``--stall-timeout-s``."""


@define(eq=False)
class EngineConnection:
    """The connection of one API process; when it ends, its rows leave the queue.

    An exception ends this connection only, and a row that cannot be read or sent fails alone.
    """

    engine: LocalEngine
    stream: FramedStream[ToEngine]
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _number_of: dict[QueueEntry, int] = field(init=False, factory=dict)
    _outcomes: list[tuple[int, PoolingOutput | Exception]] = field(init=False, factory=list)
    _has_outcomes: trio.Event = field(init=False, factory=trio.Event)
    _scopes: Scopes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._scopes = Scopes(lambda: self.engine.runner.open_scope())  # type: ignore[union-attr]

    async def serve(self) -> None:
        """Serve until the API process closes the connection. Cancellation: at once; its rows leave the queue."""
        try:
            engine = self.engine
            sizes = engine.dimensions, engine.embeds_width, engine.max_batch_tokens
            await self.stream.send(Hello(*sizes, engine.cosine_with_float32, _probe_of(engine)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                await self._receive()
                nursery.cancel_scope.cancel(reason="the API process has disconnected")
        except* trio.BrokenResourceError:
            logger.info("an API process has disconnected while answers were sent to it")
        except* Exception:
            logger.exception("the connection of an API process failed")
        finally:
            for entry in list(self._waiting.values()):
                self.engine.withdraw(entry)
            self._scopes.close_all()
            await self.stream.aclose()

    async def _receive(self) -> None:
        while (received := await self.stream.receive()) is not None:
            message, frame_payload = received
            match message:
                case Submit(rows):
                    for part, payload in parts_of(rows, frame_payload):
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
        entry = QueueEntry(request, self._settled)
        self._waiting[part.id] = entry
        self._number_of[entry] = part.id
        try:
            self.engine.submit_nowait(entry)
        except Exception as error:
            entry.fail(error)

    def _settled(self, entry: QueueEntry) -> None:
        number = self._number_of.pop(entry, None)
        if number is not None:  # not withdrawn after its launch
            self._waiting.pop(number, None)
            outcome = entry.output or entry.error
            assert outcome is not None  # noqa: S101  (it is settled)
            self._finish(number, outcome)

    def _finish(self, number: int, outcome: PoolingOutput | Exception) -> None:
        self._outcomes.append((number, outcome))
        self._has_outcomes.set()

    async def _answer(self) -> None:
        """Send outcomes; those that come while a frame is sent go together in the next. While there are none, say so.

        A process that is silent has a loop that does not run: the API process then sends rows elsewhere.
        """
        heartbeat_s = min(HEARTBEAT_S, self.engine.config.stall_timeout_s / HEARTBEATS_IN_STALL_TIMEOUT)
        while True:
            with trio.move_on_after(heartbeat_s):
                await self._has_outcomes.wait()
            self._has_outcomes = trio.Event()
            outcomes, self._outcomes = self._outcomes, []
            frame = Frame()
            for number, outcome in outcomes:
                add_answer(frame, number, outcome)
                if frame.is_full:
                    await self._send(frame)
                    frame = Frame()
            if frame.parts or not outcomes:
                await self._send(frame)

    async def _send(self, frame: Frame) -> None:
        engine = self.engine
        rates = engine.seconds_per_token.tobytes()
        answers = Answers(frame.parts, engine.waiting_tokens, engine.tokens_per_s, rates, engine.stall_reason)
        await self.stream.send(answers, frame.buffers)


def _probe_of(engine: LocalEngine) -> tuple[list[int], str] | None:
    request = engine.probe_request
    return None if request is None else (request.prompt.token_ids.tolist(), request.params[0].wire_name)


async def serve_engine(engine: LocalEngine, listener: trio.SocketListener) -> None:
    """Serve all connections forever. Cancellation: at once, connections included."""

    async def serve(stream: trio.SocketStream) -> None:
        await EngineConnection(engine, FramedStream(stream, ToEngine)).serve()

    await trio.serve_listeners(serve, [listener])

"""The server side of an engine process: connections of API processes, whose rows one engine computes."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import trio
from attrs import define, field

from trio_pool_serve.engine.local import LocalEngine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.answers import NumberedOutcome, answer_frames
from trio_pool_serve.engine.remote.arrays import Payload
from trio_pool_serve.engine.remote.rows import read_rows
from trio_pool_serve.engine.remote.scopes import Scopes
from trio_pool_serve.engine.remote.silence import HEARTBEATS_IN_TIMEOUT, wait_silent
from trio_pool_serve.engine.remote.wire import (
    Answers,
    CloseScope,
    Frame,
    Hello,
    Leaving,
    Part,
    Submit,
    ToEngine,
    Withdraw,
    parts_of,
)
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Longest pause between two messages to an API process."""

HEARTBEATS_IN_STALL_TIMEOUT = 4
"""At least so many are sent within ``stall_timeout_s``."""


@define(eq=False)
class EngineConnection:
    """The connection of one API process; when it ends, its rows leave the queue.

    An exception ends this connection only, and a row that cannot be read or sent fails alone.
    """

    engine: LocalEngine
    stream: FramedStream[ToEngine]
    hello: Callable[[], Hello]
    timeout_s: float = math.inf
    """Seconds of silence after which the API process counts as lost."""
    _is_leaving: bool = field(default=False, init=False)
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _outcomes: list[list[NumberedOutcome]] = field(init=False, factory=list)
    """Of each batch together."""
    _has_outcomes: trio.Event = field(init=False, factory=trio.Event)
    _scopes: Scopes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._scopes = Scopes(lambda: self.engine.runner.open_scope())  # type: ignore[union-attr]

    async def serve(self) -> None:
        """Serve until the API process closes the connection. Cancellation: at once; its rows leave the queue."""
        try:
            await self.stream.send(self.hello())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                nursery.start_soon(self._receive, nursery.cancel_scope)
                if self.timeout_s < math.inf:
                    silence = await wait_silent(self.stream, self.timeout_s)
                    logger.warning("an API process is lost, and its rows are withdrawn: %s", silence)
                    nursery.cancel_scope.cancel(reason="the API process is silent")
        except* trio.BrokenResourceError:
            logger.info("an API process has disconnected while answers were sent to it")
        except* Exception:
            logger.exception("the connection of an API process failed")
        finally:
            for entry in list(self._waiting.values()):
                self.engine.withdraw(entry)
            self._scopes.close_all()
            await self.stream.aclose()

    def leave(self) -> None:
        """Have the API process send no more rows, and disconnect once it has the answers for those it has sent."""
        self._is_leaving = True
        self._has_outcomes.set()

    async def _receive(self, connection: trio.CancelScope) -> None:
        while (received := await self.stream.receive()) is not None:
            message, frame_payload = received
            match message:
                case Submit(parts):
                    for part, payload in parts_of(parts, frame_payload):
                        self._submit(part, payload)
                        await trio.lowlevel.checkpoint()
                case Withdraw(ids):
                    for number in ids:
                        entry = self._waiting.pop(number, None)
                        if entry is not None:
                            self.engine.withdraw(entry)
                case CloseScope(scope):
                    self._scopes.close(scope)
            await trio.lowlevel.checkpoint()  # thousands may have been received at once
        connection.cancel(reason="the API process has disconnected")

    def _submit(self, part: Part, payload: Payload) -> None:
        try:
            requests = read_rows(part, payload, self._scopes)
        except UnsendableError as error:
            for number in part.ids:
                self._finish([(number, error)])
            return
        settled, now = self._settled, time.perf_counter()
        entries = [
            QueueEntry(request, settled, now, number) for number, request in zip(part.ids, requests, strict=True)
        ]
        self._waiting.update(zip(part.ids, entries, strict=True))
        try:
            self.engine.submit_nowait(*entries)
        except Exception as error:
            for entry in entries:
                entry.fail(error)

    def _settled(self, entries: Sequence[QueueEntry]) -> None:
        outcomes: list[NumberedOutcome] = []
        for entry in entries:
            number = entry.number
            if self._waiting.get(number) is entry:  # not withdrawn after its launch
                del self._waiting[number]
                outcome = entry.output or entry.error
                assert outcome is not None  # noqa: S101  (it is settled)
                outcomes.append((number, outcome))
        if outcomes:
            self._finish(outcomes)

    def _finish(self, outcomes: list[NumberedOutcome]) -> None:
        self._outcomes.append(outcomes)
        self._has_outcomes.set()

    async def _answer(self) -> None:
        """Send outcomes; those that come while a frame is sent go together in the next. While there are none, say so.

        A process that is silent has a loop that does not run: the API process then sends rows elsewhere.
        """
        heartbeat_s = min(
            HEARTBEAT_S,
            self.engine.config.stall_timeout_s / HEARTBEATS_IN_STALL_TIMEOUT,
            self.timeout_s / HEARTBEATS_IN_TIMEOUT,
        )
        has_left = False
        while True:
            with trio.move_on_after(heartbeat_s):
                await self._has_outcomes.wait()
            self._has_outcomes = trio.Event()
            if self._is_leaving and not has_left:
                has_left = True
                await self.stream.send(Leaving())
            outcomes, self._outcomes = self._outcomes, []
            for frame in answer_frames(outcomes) if outcomes else [Frame()]:
                await self._send(frame)

    async def _send(self, frame: Frame) -> None:
        engine = self.engine
        rates = engine.seconds_per_token.tobytes()
        answers = Answers(frame.parts, engine.waiting_tokens, engine.tokens_per_s, rates, engine.stall_reason)
        await self.stream.send(answers, frame.buffers)


def hello_of(engine: LocalEngine, zone: str = "") -> Hello:
    """Return what an engine says first on each connection. Raises as ``Engine.submit`` when not ready."""
    probe = engine.probe_request
    return Hello(
        engine.dimensions,
        engine.embeds_width,
        engine.max_batch_tokens,
        engine.cosine_with_float32,
        None if probe is None else (probe.prompt.token_ids.tolist(), probe.params[0].wire_name),
        zone=zone,
        resident_bytes=engine.memory.resident_bytes,
        device_bytes=engine.memory.device_bytes,
    )


async def serve_engine(engine: LocalEngine, listener: trio.SocketListener, zone: str = "") -> None:
    """Serve all connections of a Unix socket forever. Cancellation: at once, connections included."""

    async def serve(stream: trio.SocketStream) -> None:
        await EngineConnection(engine, FramedStream(stream, ToEngine), partial(hello_of, engine, zone)).serve()

    await trio.serve_listeners(serve, [listener])

"""The connection of one API process to a device server."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.answers import NumberedOutcome, answer_frames
from trio_pool_serve.engine.remote.arrays import Payload
from trio_pool_serve.engine.remote.joiner import SentBatch
from trio_pool_serve.engine.remote.rows import read_rows
from trio_pool_serve.engine.remote.silence import HEARTBEATS_IN_TIMEOUT, wait_silent
from trio_pool_serve.engine.remote.wire import (
    Answers,
    Done,
    Frame,
    Heartbeat,
    Hello,
    Leaving,
    Part,
    QueueState,
    Submit,
    ToEngine,
    Withdraw,
    parts_of,
)
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PlannedBatch

if TYPE_CHECKING:
    from trio_pool_serve.engine.remote.device_server import DeviceServer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Longest pause between two messages to an API process."""

HEARTBEATS_IN_STALL_TIMEOUT = 4
"""Least number of heartbeats within ``stall_timeout_s``."""


@define(eq=False)
class ApiConnection:
    """The connection of one API process; when it ends, its batches are withdrawn.

    An exception ends this connection only, and a row that cannot be read or sent fails alone.
    """

    server: "DeviceServer"
    stream: FramedStream[ToEngine]
    hello: Callable[[], Hello]
    timeout_s: float = math.inf
    """Seconds of silence after which the API process counts as lost."""
    queue: QueueState = field(init=False, factory=QueueState)
    """What waits in the API process, as it has said last."""
    _is_leaving: bool = field(default=False, init=False)
    _batches: dict[int, SentBatch] = field(init=False, factory=dict)
    """Those that are not answered."""
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _outcomes: list[list[NumberedOutcome]] = field(init=False, factory=list)
    """Of each pass together."""
    _done: list[Done] = field(init=False, factory=list)
    _has_outcomes: trio.Event = field(init=False, factory=trio.Event)

    async def serve(self) -> None:
        """Serve until the API process closes the connection. Cancellation: at once; its batches are withdrawn."""
        self.server.connections[self] = None
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
            del self.server.connections[self]
            for entry in [*self._waiting.values()]:
                self.server.joiner.withdraw(entry)
            await self.stream.aclose()

    def leave(self) -> None:
        """Ask the API process to send no more rows, and to disconnect once all of its rows are answered."""
        self._is_leaving = True
        self._has_outcomes.set()

    def wake(self) -> None:
        """Send answers, also if there are none."""
        self._has_outcomes.set()

    async def _receive(self, connection: trio.CancelScope) -> None:
        while (received := await self.stream.receive()) is not None:
            message, frame_payload = received
            match message:
                case Submit():
                    await self._submit(message, frame_payload)
                case Heartbeat(queue):
                    has_grown = queue.tokens > 2 * max(self.queue.tokens, self.server.worker.budget.tokens)
                    self.queue = queue
                    if has_grown:
                        self.server.tell_others(self)
                case Withdraw(ids):
                    for number in ids:
                        if (waiting := self._waiting.pop(number, None)) is not None:
                            self.server.joiner.withdraw(waiting)
            await trio.lowlevel.checkpoint()  # thousands may have been received at once
        connection.cancel(reason="the API process has disconnected")

    async def _submit(self, message: Submit, frame_payload: memoryview) -> None:
        facts = message.batch
        batch = self._batches.get(facts.number)
        if batch is None:
            if len(self._batches) >= self.server.most_batches:
                raise ValueError(f"more than {self.server.most_batches} batches were sent before they were answered")
            batch = self._batches[facts.number] = SentBatch(facts, self._settled)
        elif not batch.arriving:
            raise ValueError("a batch has the number of one that is not answered")
        for part, payload in parts_of(message.parts, frame_payload):
            batch.arriving -= len(part.ids)
            if batch.arriving < 0:
                raise ValueError("a batch has more rows than it was said to have")
            self._read(part, payload, batch)
            await trio.lowlevel.checkpoint()
        if not batch.arriving:
            self.queue = facts.queue
            if batch.rows:
                self.server.joiner.put_nowait(batch)

    def _read(self, part: Part, payload: Payload, batch: SentBatch) -> None:
        facts = batch.facts
        try:
            requests = read_rows(part, payload, PlannedBatch(facts.number, facts.rows) if facts.is_planned else None)
        except UnsendableError as error:
            batch.left -= len(part.ids)
            self._finish(batch, [(number, error) for number in part.ids])
            return
        settle, now = batch.settle, time.perf_counter()
        for number, request in zip(part.ids, requests, strict=True):
            entry = QueueEntry(request, settle, now, number, holder=batch, tokens=request.tokens)
            self._waiting[number] = entry
            batch.rows[entry] = None

    def _settled(self, batch: SentBatch, entries: Sequence[QueueEntry]) -> None:
        outcomes: list[NumberedOutcome] = []
        for entry in entries:
            if self._waiting.get(entry.number) is entry:  # not withdrawn after its launch
                del self._waiting[entry.number]
                outcome = entry.output or entry.error
                assert outcome is not None  # noqa: S101  (it is settled)
                outcomes.append((entry.number, outcome))
        self._finish(batch, outcomes)

    def _finish(self, batch: SentBatch, outcomes: list[NumberedOutcome]) -> None:
        if outcomes:
            self._outcomes.append(outcomes)
        if not batch.left:
            del self._batches[batch.facts.number]
            self._done.append(Done(batch.facts.number, batch.device_s))
        self._has_outcomes.set()

    async def _answer(self) -> None:
        """Send outcomes; those that come while a frame is sent go together in the next. While there are none, say so.

        A process that is silent has a loop that does not run: the API process then sends rows elsewhere.
        """
        heartbeat_s = min(
            HEARTBEAT_S,
            self.server.config.stall_timeout_s / HEARTBEATS_IN_STALL_TIMEOUT,
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
            done, self._done = self._done, []
            frames = [*answer_frames(outcomes)] or [Frame()]
            for frame in frames[:-1]:
                await self._send(frame, [])
            await self._send(frames[-1], done)

    async def _send(self, frame: Frame, done: list[Done]) -> None:
        server = self.server
        answers = Answers(
            frame.parts,
            done,
            server.worker.budget.tokens,
            server.computed_tokens,
            server.others_share(self),
            server.others_small_requests(self),
            server.left_waiting,
            server.worker.stall_reason,
        )
        await self.stream.send(answers, frame.buffers)

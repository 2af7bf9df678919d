"""A device server as the dispatcher sees it: the connection to an engine process, reopened whenever it breaks."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator

import trio
from attrs import define, field

from trio_pool_serve.engine.background_work import background_room
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import Device, InFlightBatch, Outcome, deliver
from trio_pool_serve.engine.engine import ModelQueue
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.connectors import FAILURES_TO_CONNECT, Connector
from trio_pool_serve.engine.remote.frames import ReceivedPart, received_parts
from trio_pool_serve.engine.remote.link import (
    HEARTBEATS_IN_TIMEOUT,
    LinkRefusedError,
    keep_calling,
    run_link,
    wait_silent,
)
from trio_pool_serve.engine.remote.parts import read_answers, row_frames
from trio_pool_serve.engine.remote.wire import (
    CREDITS,
    FULL_FRAME_ROWS,
    Answers,
    BatchFacts,
    FromEngine,
    Heartbeat,
    Hello,
    Leaving,
    QueueState,
    Submit,
    Withdraw,
)
from trio_pool_serve.engine.stalled import stall_of_link
from trio_pool_serve.errors import BatchFailedError, EngineProcessDiedError, PoolServeError, UnsendableError, require
from trio_pool_serve.processes.child_process import RestartBackoff
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput

logger = logging.getLogger(__name__)

STABLE_AFTER_S = 5.0
"""If a connection lasted longer, the pauses between attempts start again from the first."""


@define(eq=False, repr=False)
class RemoteDevice(Device):
    """One device server: sends it batches, and settles their rows with the answers.

    ``on_ready`` is called with its ``Hello``, and returns the queue whose rows it computes; or it raises
    ``LinkRefusedError``.
    """

    computes_ahead = True
    connector: Connector
    on_ready: Callable[[Hello], ModelQueue]
    stall_timeout_s: float = math.inf
    """A device server that is silent, or answers none of its rows, for longer counts as stalled."""
    silence_timeout_s: float = math.inf
    """A ready device server that is silent for longer is disconnected: it is stopped, or stuck in the kernel."""
    hello: Hello | None = field(default=None, init=False)
    """The first message of the connection; ``None`` while there is no ready device server."""
    queue: ModelQueue = field(init=False)
    """The queue of the model that the device server computes, since it was ready for the first time."""
    is_draining: bool = field(default=False, init=False)
    """Whether an operator wants the device server to get no more rows."""
    failure: str = field(default="", init=False)
    """Why there is no connection; empty once there is one."""
    losses: int = field(default=0, init=False)
    """Number of connections to a ready device server that have ended."""
    answers: Answers | None = field(default=None, init=False)
    """The latest answers of the connection."""
    _stream: FramedStream[FromEngine] = field(init=False)
    """The stream of the latest connection."""
    _sent_tokens: int = field(default=0, init=False)
    """Tokens of admitted requests in the latest ``QueueState`` that was sent."""
    _is_leaving: bool = field(default=False, init=False)
    """Whether the device server has announced that it is draining."""
    _received_at: float = field(default=math.inf, init=False)
    """When the latest message was received; infinite while there is no connection."""
    _answered_at: float = field(default=0.0, init=False)
    """When the latest answer to a row was received."""
    _numbers: Iterator[int] = field(init=False, factory=itertools.count)
    """Numbers of rows; a batch has the number of its first row."""
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    """By number: launched rows that are neither settled nor withdrawn, whether they have been sent or not."""
    _unsent: list[InFlightBatch] = field(init=False, factory=list)
    """Launched batches that are still to be sent, in order."""
    _withdrawn: list[int] = field(init=False, factory=list)
    """Numbers of withdrawn rows that are still to be sent."""
    _has_work: trio.Event = field(init=False, factory=trio.Event)

    @property
    def waiting_rows(self) -> int:
        """Number of launched rows that are not settled."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of launched rows that are not settled."""
        return sum(entry.tokens for entry in self._waiting.values())

    @property
    def takes_rows(self) -> bool:  # noqa: D102
        return self.hello is not None and not self._is_leaving and not self.is_draining

    @property
    def stall_reason(self) -> str:  # noqa: D102
        now = time.perf_counter()
        # Background work may take any time while other programs keep the cores busy.
        due = [batch.launched for batch in self.in_flight if not batch.is_planned]
        unanswered_s = now - max(self._answered_at, due[0]) if due else 0.0
        reported = "" if self.answers is None else self.answers.stall_reason
        return stall_of_link(now - self._received_at, reported, unanswered_s, self.stall_timeout_s)

    @property
    def room(self) -> int:  # noqa: D102
        return CREDITS * self.launches - sum([not each.is_planned for each in self.in_flight])

    def planned_room(self, *, others_wait: bool) -> int:  # noqa: D102
        planned = sum([each.is_planned for each in self.in_flight])
        return background_room(
            self.facts.background_launches, planned, room=self.launches - planned, others_wait=others_wait
        )

    @property
    def budget(self) -> int:
        """The token budget of a batch, which the device server halves if it runs out of memory."""
        return self.facts.max_batch_tokens if self.answers is None else self.answers.budget

    @property
    def limits(self) -> BatchLimits:  # noqa: D102
        # Rows of other processes are joined to the same pass, and it should be short as a whole.
        share = 0.0 if self.answers is None else self.answers.others_share
        return BatchLimits(self.budget, max(1, int(self.passes.short_tokens / (1 + share))), self.facts.pads)

    async def launch(self, batch: InFlightBatch) -> bool:  # noqa: D102
        for entry in batch.entries:
            entry.holder, entry.number = self, next(self._numbers)
            self._waiting[entry.number] = entry
        self._unsent.append(batch)
        self._has_work.set()
        await trio.lowlevel.checkpoint()  # the dispatcher may launch batch after batch
        return False

    def withdraw(self, entry: QueueEntry) -> None:
        """Stop waiting for a row: the device server does not compute it, unless it is launched there."""
        if self._waiting.pop(entry.number, None) is not None:
            self._withdrawn.append(entry.number)
            self._has_work.set()

    def note_admitted(self, tokens: int) -> None:
        """Send the state of the queue if the tokens of admitted requests have doubled since it was sent.

        It comes with each batch, too, but in a flood no credit returns soon.
        """
        if tokens > 2 * max(self._sent_tokens, self.budget):
            self._has_work.set()

    async def run(self) -> None:
        """Connect, send and receive, forever; reconnect if the engine process dies or the connection fails.

        Cancellation: at once; batches are handled as when the connection ends.
        """
        backoff = RestartBackoff(self.connector.pauses_s, STABLE_AFTER_S)
        while True:
            began = math.inf
            try:
                self._stream = await self.connector.connect()
                began = trio.current_time()
                failure = await run_link(self._stream, self.connector.timeout_s, "engine process", self._receive)
            except FAILURES_TO_CONNECT as error:
                failure = str(error) or type(error).__name__
            finally:
                self._lose()
            if failure and failure != self.failure:  # logged once, not at each attempt
                logger.warning("no connection to the engine process at %s: %s", self.connector.name, failure)
                self.failure = failure
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))

    async def _receive(self, nursery: trio.Nursery, message: FromEngine, payload: memoryview) -> None:
        self._received_at = time.perf_counter()
        match message:
            case Hello():
                self._begin(message)
                nursery.start_soon(self._send)
                heartbeat_s = min(self.connector.timeout_s, self.silence_timeout_s) / HEARTBEATS_IN_TIMEOUT
                nursery.start_soon(keep_calling, heartbeat_s, lambda: self._has_work.set())
                # Not before: while it loads its model, a process may send nothing for minutes.
                nursery.start_soon(wait_silent, self._stream, self.silence_timeout_s)
            case Answers() if self.hello is not None:
                await self._deliver(message, payload)
            case Leaving() if not self._is_leaving:
                self._is_leaving = True
                nursery.start_soon(self._leave, nursery.cancel_scope)

    def _begin(self, hello: Hello) -> None:
        """Begin to use a device server that is ready. Raises ``LinkRefusedError``."""
        require(self.hello is None, "it sent its description twice", LinkRefusedError)
        self.queue = self.on_ready(hello)
        logger.info("connected to the engine process at %s", self.connector.name)
        self.hello, self.facts, self.zone, self.launches = hello, hello.facts, hello.zone, hello.launches
        self.failure = ""
        self.queue.dispatcher.add(self)

    async def _leave(self, connection: trio.CancelScope) -> None:
        """End the connection once the device server has no rows of this process, and no waiting rows depend on it."""
        dispatcher = self.queue.dispatcher
        while self.in_flight or (self in dispatcher.serving and dispatcher.has_waiting):
            await dispatcher.room.park()  # until a batch is done, which may have been the last one
        connection.cancel(reason="the engine process is leaving")

    def _lose(self) -> None:
        """Forget the state of the device server; its unsent rows are queued again, and the others are lost rows."""
        if self.hello is not None:
            self.losses += 1
            logger.info("the connection to the engine process at %s ended", self.connector.name)
            # One of the rows that were sent may be why the process died; an unsent row cannot be.
            sent = [batch for batch in self.in_flight if batch not in self._unsent]
            self.queue.dispatcher.lose(self, sent, self._unsent, EngineProcessDiedError(self.connector.loss))
        self.hello, self.answers, self._is_leaving, self._received_at = None, None, False, math.inf
        self.in_flight, self._unsent, self._withdrawn, self._waiting, self._sent_tokens = [], [], [], {}, 0

    async def _send(self) -> None:
        """Send batches, withdrawals and the state of the queue, forever; and heartbeats, if silence ends the link.

        A batch that is being sent counts as sent: if the connection ends, the device server may have computed it.
        """
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            if not self._unsent:  # a batch comes with the state of the queue
                await self._stream.send(Heartbeat(self._queue_state()))
            while self._unsent:
                await self._send_batch(self._unsent.pop(0))
            withdrawn, self._withdrawn = self._withdrawn, []
            for begin in range(0, len(withdrawn), FULL_FRAME_ROWS):
                await self._stream.send(Withdraw(withdrawn[begin : begin + FULL_FRAME_ROWS]))

    async def _send_batch(self, batch: InFlightBatch) -> None:
        # A planned batch is computed whole: in its last bits, a row's output depends on the rows beside it.
        rows = [(entry.number, entry.request) for entry in batch.entries if batch.is_planned or not entry.is_abandoned]
        if not batch.is_planned:
            rows.sort(key=lambda row: id(row[1].params))  # shared params, such as a query's vectors, are sent once
        refused: dict[int, UnsendableError] = {}
        frames = [*row_frames(rows, refused.__setitem__)]
        for number, error in refused.items():
            logger.error("a row failed: %s", error)
            self._fail_rows([number], error)
        if batch.is_planned and refused:
            self._fail_rows(
                [number for number, _ in rows],
                BatchFailedError(f"Another input of the batch failed: {next(iter(refused.values()))}"),
            )
            frames.clear()  # the device server would wait for the missing row
        if not frames:
            self.queue.dispatcher.free(self, batch)
            return
        first = batch.entries[0]
        facts = BatchFacts(
            first.number,
            len(rows) - len(refused),
            first.key,
            first.request.rank,
            self._queue_state(),
            batch.is_planned,
            batch.is_suspect,
        )
        for frame in frames:
            await self._stream.send(Submit(frame.parts, facts), frame.buffers)

    def _queue_state(self) -> QueueState:
        admission = self.queue.admission
        self._sent_tokens = max(0, admission.tokens)
        return QueueState(self._sent_tokens, max(1, admission.clients), self.queue.scheduler.small_requests)

    def _fail_rows(self, numbers: Iterable[int], error: PoolServeError) -> None:
        for number in numbers:
            if (entry := self._waiting.pop(number, None)) is not None:
                entry.fail(error)

    async def _deliver(self, message: Answers, payload: memoryview) -> None:
        """Free the room of batches that are done, then settle the rows that are answered."""
        device_s = {done.batch: done.device_s for done in message.done}
        done = [batch for batch in self.in_flight if batch.entries[0].number in device_s]
        for batch in done:
            batch.device_s = 0.0 if batch.is_planned else device_s[batch.entries[0].number]
        self._note_others(message, sum([batch.batch.tokens for batch in done]))
        # Before rows are delivered, so that the next batches can be taken meanwhile. Also if none is done: the device
        # server may have stalled until now.
        self.queue.dispatcher.free(self, *done)
        if message.parts:
            self._answered_at = time.perf_counter()
        outcomes = [each for part in received_parts(message.parts, payload) for each in self._outcomes_of(part)]
        with trio.CancelScope(shield=True):  # at most one frame of rows, which no longer belong to the connection
            await deliver(outcomes)
        self._fail_rows(
            [entry.number for batch in done for entry in batch.entries],
            BatchFailedError("The engine process did not compute this input."),
        )
        if self._sent_tokens > max(self.budget, 2 * self.queue.admission.tokens):
            self._has_work.set()  # the share of other processes is larger now

    def _note_others(self, message: Answers, own_tokens: int) -> None:
        """Note the work of other processes at the device servers, and the speed that is left for this process."""
        before, self.answers, dispatcher = self.answers, message, self.queue.dispatcher
        if before is not None:  # the server counts from its start, which was before this connection
            dispatcher.others_tokens += max(0, message.computed_tokens - before.computed_tokens) - own_tokens
            self.queue.scheduler.small_elsewhere += max(0, message.others_small_requests - before.others_small_requests)
        links = [each for each in dispatcher.available if isinstance(each, RemoteDevice)]
        known = [each.answers for each in links if each.answers is not None]
        # The minimum: rows go to the device server with the least other work, and a server may claim any number.
        share = min([each.others_share for each in known], default=0.0)
        per_s = sum([1 / each.seconds_per_token for each in known if each.seconds_per_token])
        self.queue.rates.note_others(share, 1 / per_s if per_s else math.nan)

    def _outcomes_of(self, part: ReceivedPart) -> Iterator[Outcome]:
        """Yield the outputs of a part's rows that were not withdrawn; fail rows without an output."""
        try:
            outputs, rows = read_answers(part)
        except PoolServeError as error:
            self._fail_rows(part.ids, error)
            return
        forward_s, copy_s = outputs.forward_s, outputs.copy_s
        # The clocks of two machines differ: the time of the launch follows from the arrival of the answer.
        launched = self._answered_at - forward_s - copy_s
        waiting, least_s = self._waiting, outputs.queue_s
        for number, values in zip(part.ids, rows, strict=True):
            if (entry := waiting.pop(number, None)) is None:
                continue
            if len(values) != len(entry.request.params):
                entry.fail(UnsendableError("The engine process sent other outputs than requested."))
                continue
            queue_s = launched - entry.queued_at
            yield entry, PoolingOutput(values, queue_s if queue_s > least_s else least_s, forward_s, copy_s)

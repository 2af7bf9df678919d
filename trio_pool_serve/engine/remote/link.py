"""A link: the connection of an API process to one engine process, made again whenever it breaks."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.engine.compute_rates import UNKNOWN, SecondsPerToken
from trio_pool_serve.engine.queue_entry import (
    SUBMITTERS_BETWEEN_CHECKPOINTS,
    QueueEntry,
    by_submitter,
    finish_together,
)
from trio_pool_serve.engine.remote.answers import read_answers
from trio_pool_serve.engine.remote.connectors import FAILURES_TO_CONNECT, Connector
from trio_pool_serve.engine.remote.keys import LinkRefusedError
from trio_pool_serve.engine.remote.rows import row_frames
from trio_pool_serve.engine.remote.scopes import RemoteScope
from trio_pool_serve.engine.remote.silence import HEARTBEATS_IN_TIMEOUT, wait_silent
from trio_pool_serve.engine.remote.wire import (
    FULL_FRAME_ROWS,
    Answers,
    CloseScope,
    FromEngine,
    Heartbeat,
    Hello,
    Leaving,
    Submit,
    Withdraw,
    parts_of,
)
from trio_pool_serve.errors import BatchFailedError, PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.restart_backoff import RestartBackoff
from trio_pool_serve.types import PoolingOutput

logger = logging.getLogger(__name__)

STABLE_AFTER_S = 5.0
"""A connection that lasted longer is made again at once, and then after the first of its connector's pauses."""


@define(eq=False)
class Link:
    """One engine process: sends it rows, and settles their entries with the answers.

    ``on_ready`` is called when the engine process is ready, and may raise ``LinkRefusedError``. ``on_lost`` is called
    with the entries that were not settled when a connection ended whose engine process was ready.
    """

    connector: Connector
    on_ready: Callable[["Link"], None]
    on_lost: Callable[["Link", list[QueueEntry]], None]
    stall_timeout_s: float = math.inf
    """An engine process that is silent for longer counts as stalled."""
    max_queue_s: float = 0.0
    """For so long rows may wait there behind those of others, before they are computed."""
    position: int = 0
    """Its place in the order of engines."""
    hello: Hello | None = field(default=None, init=False)
    """The sizes of the loaded model; ``None`` while no engine process is ready."""
    tokens_per_s: float = field(default=0.0, init=False)
    """Of the latest batches, also of small ones: the engine is at least as fast; 0 if unknown."""
    seconds_per_token: SecondsPerToken = field(default=UNKNOWN, init=False)
    own_tokens: int = field(default=0, init=False)
    """Of the rows that were sent by this process and are not finished, without those of background work."""
    background_tokens: int = field(default=0, init=False)
    """Of the rows of background work, which other rows do not wait for."""
    scopes: set[RemoteScope] = field(init=False, factory=set)
    is_draining: bool = field(default=False, init=False)
    """Whether it is to get no more rows; set by those who operate the server."""
    failure: str = field(default="", init=False)
    """Why there is no connection; empty once there is one."""
    losses: int = field(default=0, init=False)
    """Connections that have ended."""
    _left: trio.Event | None = field(default=None, init=False)
    """Of an engine process that is leaving: set once it has no rows of this process any more."""
    _stall_reason: str = field(default="", init=False)
    """What the engine process has said last."""
    _last_heard: float = field(default=0.0, init=False)
    _answered_at: float = field(default=0.0, init=False)
    """When a row was answered, or the first one was sent."""
    _others_tokens: int = field(default=0, init=False)
    _numbers: Iterator[int] = field(init=False, factory=itertools.count)
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _unsent: dict[int, QueueEntry] = field(init=False, factory=dict)
    _withdrawn: list[int] = field(init=False, factory=list)
    _closed_scopes: list[int] = field(init=False, factory=list)
    _has_work: trio.Event = field(init=False, factory=trio.Event)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait at the engine process: this process's, and those of others as of its last answer."""
        return self.own_tokens + self._others_tokens

    @property
    def waiting_rows(self) -> int:
        """Rows that were sent by this process and are not finished."""
        return len(self._waiting)

    @property
    def is_usable(self) -> bool:
        """Whether it takes new rows, and answers come back."""
        return self.takes_rows and not self.stall_reason

    @property
    def takes_rows(self) -> bool:
        """Whether the engine process is ready, and neither it nor the link is to get no more rows."""
        return self.hello is not None and self._left is None and not self.is_draining

    @property
    def has_heartbeats(self) -> bool:
        """Whether the engine process says how much waits there also while it has no answers, as between machines."""
        return self.connector.timeout_s < math.inf

    @property
    def zone(self) -> str:
        """Where the engine process is."""
        return "" if self.hello is None else self.hello.zone

    @property
    def stall_reason(self) -> str:
        """Why nothing comes back from the engine process though it is ready; empty if it does."""
        if self.hello is None:
            return ""
        silent_s = time.perf_counter() - self._last_heard
        if silent_s > self.stall_timeout_s:
            return f"the engine process has been silent for {silent_s:.0f} s"
        unanswered_s = time.perf_counter() - self._answered_at
        if self.own_tokens and unanswered_s > self.stall_timeout_s + self.max_queue_s:
            return f"the engine process has had rows for {unanswered_s:.0f} s and has answered none"
        return self._stall_reason

    @property
    def state(self) -> str:
        """A word for those who operate the server."""
        if self.hello is None:
            return "connecting"
        if not self.takes_rows:
            return "draining"
        return "stalled" if self.stall_reason else "ready"

    def send_nowait(self, entry: QueueEntry) -> None:
        """Send a row soon; its entry is settled on the loop."""
        entry.link = self
        number = entry.number = next(self._numbers)
        self._waiting[number] = self._unsent[number] = entry
        self._count(entry, 1)
        self._has_work.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Withdraw a row, unless it is settled."""
        number = entry.number
        if self._waiting.get(number) is not entry:
            return
        self._settle(number)
        # The engine process waits for all rows of a planned batch.
        if entry.request.planned is not None or self._unsent.pop(number, None) is None:
            self._withdrawn.append(number)
            self._has_work.set()

    def open_scope(self) -> RemoteScope:
        """Return a new scope for one request's queries; it ends with the engine process at the latest."""
        scope = RemoteScope(next(self._numbers), self._close_scope)
        self.scopes.add(scope)
        return scope

    def _close_scope(self, scope: RemoteScope) -> None:
        if scope in self.scopes:
            self.scopes.remove(scope)
            self._closed_scopes.append(scope.number)
            self._has_work.set()
            self._leave_when_idle()

    def _settle(self, number: int) -> QueueEntry | None:
        entry = self._waiting.pop(number, None)
        if entry is not None:
            self._count(entry, -1)
            self._leave_when_idle()
        return entry

    def _count(self, entry: QueueEntry, times: int) -> None:
        if entry.request.planned is None:
            if not self.own_tokens:
                self._answered_at = time.perf_counter()
            self.own_tokens += times * entry.request.tokens
        else:
            self.background_tokens += times * entry.request.tokens

    def _leave_when_idle(self) -> None:
        if self._left is not None and not self._waiting and not self.scopes:
            self._left.set()

    async def run(self) -> None:
        """Connect, send and receive, forever; reconnect when the engine process dies or the connection fails.

        Cancellation: at once; ``on_lost`` is called as when the connection ends.
        """
        backoff = RestartBackoff(self.connector.pauses_s, STABLE_AFTER_S)
        while True:
            began = math.inf
            try:
                stream = await self.connector.connect()
            except FAILURES_TO_CONNECT as error:
                self._fail(str(error) or type(error).__name__)
            else:
                began = trio.current_time()
                try:
                    await self._exchange(stream)
                finally:
                    self._lose()
                    await stream.aclose()
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))

    def _fail(self, why: str) -> None:
        if why != self.failure:  # not at each attempt
            logger.warning("no connection to the engine process at %s: %s", self.connector.name, why)
            self.failure = why

    async def _exchange(self, stream: FramedStream[FromEngine]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, stream, nursery)
                if self.has_heartbeats:
                    silence = await wait_silent(stream, self.connector.timeout_s)
                    nursery.cancel_scope.cancel(reason="the engine process is silent")
                    self._fail(silence)
        except* trio.BrokenResourceError:
            logger.debug("the engine process has died while rows were sent to it")
        except* LinkRefusedError as refusals:
            self._fail(str(refusals.exceptions[0]))
        except* Exception:
            # A group from the nursery; with a cancellation in it, it would be no Exception.
            logger.exception("a connection to an engine process failed")

    async def _receive(self, stream: FramedStream[FromEngine], nursery: trio.Nursery) -> None:
        while (received := await stream.receive()) is not None:
            message, payload = received
            self._last_heard = time.perf_counter()
            match message:
                case Hello():
                    self._begin(message)
                    nursery.start_soon(self._send, stream)
                case Answers():
                    await self._deliver(message, payload)
                case Leaving() if self._left is None:
                    self._left = trio.Event()
                    nursery.start_soon(self._leave, self._left, nursery.cancel_scope)
        nursery.cancel_scope.cancel(reason="the engine process is gone")

    def _begin(self, hello: Hello) -> None:
        """Begin to use an engine process that is ready. Raises ``LinkRefusedError``."""
        if self.hello is not None:
            raise LinkRefusedError("it has said hello twice")
        self.hello = hello
        try:
            self.on_ready(self)
        except LinkRefusedError:
            self.hello = None
            raise
        self.failure = ""

    async def _leave(self, left: trio.Event, connection: trio.CancelScope) -> None:
        """End the connection once the engine process has no rows or queries of this process."""
        self._leave_when_idle()
        await left.wait()
        connection.cancel(reason="the engine process is leaving")

    def _lose(self) -> None:
        """Forget the state of the engine process, and hand over all rows that wait."""
        was_ready, self.hello, self._left = self.hello is not None, None, None
        self._unsent.clear()
        self._withdrawn.clear()
        self._closed_scopes.clear()
        self.scopes.clear()
        self._others_tokens, self.tokens_per_s, self._stall_reason = 0, 0.0, ""
        self.seconds_per_token = UNKNOWN
        lost, self._waiting, self.own_tokens, self.background_tokens = list(self._waiting.values()), {}, 0, 0
        if was_ready:
            self.losses += 1
            logger.info("the connection to the engine process at %s has ended", self.connector.name)
            self.on_lost(self, lost)

    async def _send(self, stream: FramedStream[FromEngine]) -> None:
        """Send what has accumulated since the last frame, forever; where silence counts, say so if there is nothing."""
        heartbeat_s = self.connector.timeout_s / HEARTBEATS_IN_TIMEOUT
        while True:
            with trio.move_on_after(heartbeat_s):
                await self._has_work.wait()
            self._has_work = trio.Event()
            unsent, self._unsent = self._unsent, {}
            withdrawn, self._withdrawn = self._withdrawn, []
            closed, self._closed_scopes = self._closed_scopes, []
            if not (unsent or withdrawn or closed):
                await stream.send(Heartbeat())
            await self._send_rows(stream, unsent)
            for begin in range(0, len(withdrawn), FULL_FRAME_ROWS):
                await stream.send(Withdraw(withdrawn[begin : begin + FULL_FRAME_ROWS]))
            for scope in closed:
                await stream.send(CloseScope(scope))

    async def _send_rows(self, stream: FramedStream[FromEngine], unsent: dict[int, QueueEntry]) -> None:
        rows = (
            (number, entry.request)
            for number, entry in unsent.items()
            if number in self._waiting or entry.request.planned is not None
        )
        for frame in row_frames(rows, self._refuse):
            await stream.send(Submit(frame.parts), frame.buffers)

    def _refuse(self, number: int, error: UnsendableError) -> None:
        logger.error("a row failed: %s", error)
        entry = self._settle(number)
        if entry is not None:
            entry.fail(error)
            self._fail_planned_with(entry, error)

    def _fail_planned_with(self, entry: QueueEntry, error: PoolServeError) -> None:
        """Fail the other rows of a planned batch, which the engine process would never have complete."""
        planned = entry.request.planned
        if planned is None or not isinstance(error, UnsendableError):
            return
        for other in [waiting for waiting in self._waiting.values() if waiting.request.planned == planned]:
            self.withdraw(other)
            other.fail(BatchFailedError(f"Another input of the batch has failed: {error}"))

    async def _deliver(self, message: Answers, frame_payload: memoryview) -> None:
        outcomes: list[tuple[QueueEntry, PoolingOutput]] = []
        if message.parts:
            self._answered_at = time.perf_counter()
        for part, payload in parts_of(message.parts, frame_payload):
            answers = read_answers(part, payload)
            if isinstance(answers, PoolServeError):
                for number in part.ids:
                    if (failed := self._settle(number)) is not None:
                        failed.fail(answers)
                        self._fail_planned_with(failed, answers)
            else:
                for number, output in zip(part.ids, answers, strict=True):
                    entry = self._waiting.get(number)
                    if entry is not None and len(output.values) == len(entry.request.params):
                        outcomes.append((entry, output))
                    elif entry is not None:
                        self._refuse(
                            number, UnsendableError("The engine process has sent other outputs than asked for.")
                        )
        for index, together in enumerate(by_submitter(outcomes), start=1):
            if waiting := [outcome for outcome in together if self._settle(outcome[0].number) is not None]:
                finish_together(waiting)
            if index % SUBMITTERS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
        self.tokens_per_s = message.tokens_per_s if message.tokens_per_s < math.inf else 0.0
        rates, self._stall_reason = np.frombuffer(message.seconds_per_token, np.float64), message.stall_reason
        # NaN, if they are unknown. Zeros or infinities would send everything there, or have everything refused.
        self.seconds_per_token = rates if rates.min() > 0 and rates.max() < math.inf else UNKNOWN
        self._others_tokens = max(0, message.waiting_tokens - self.own_tokens)

    def __repr__(self) -> str:
        return f"<Link {self.connector.name}, {self.state}, {self.waiting_rows} rows, {self.waiting_tokens} tokens>"

"""A link: the connection of an API process to one engine process, made again whenever it breaks."""

import itertools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

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
from trio_pool_serve.engine.remote.rows import row_frames
from trio_pool_serve.engine.remote.scopes import RemoteScope
from trio_pool_serve.engine.remote.wire import (
    Answers,
    CloseScope,
    FromEngine,
    Hello,
    Submit,
    Withdraw,
    parts_of,
)
from trio_pool_serve.errors import BatchFailedError, EngineProcessDiedError, PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput

logger = logging.getLogger(__name__)

RECONNECT_S = 0.1
"""Pause before the next connection, in case the engine process breaks each of them."""


@define(eq=False)
class Link:
    """One engine process: sends it rows, and settles their entries with the answers.

    The listening socket belongs to the process that restarts engine processes and outlives them: connecting waits for
    the next one.
    """

    path: Path
    stall_timeout_s: float = math.inf
    """An engine process that is silent for longer counts as stalled."""
    hello: Hello | None = field(default=None, init=False)
    """The sizes of the loaded model; ``None`` while no engine process is ready."""
    tokens_per_s: float = field(default=0.0, init=False)
    seconds_per_token: SecondsPerToken = field(default=UNKNOWN, init=False)
    own_tokens: int = field(default=0, init=False)
    """Of the rows that were sent by this process and are not finished."""
    scopes: set[RemoteScope] = field(init=False, factory=set)
    _stall_reason: str = field(default="", init=False)
    """What the engine process has said last."""
    _last_heard: float = field(default=0.0, init=False)
    _others_tokens: int = field(default=0, init=False)
    _numbers: Iterator[int] = field(init=False, factory=itertools.count)
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _unsent: dict[int, QueueEntry] = field(init=False, factory=dict)
    _withdrawn: list[int] = field(init=False, factory=list)
    _closed_scopes: list[int] = field(init=False, factory=list)
    _has_work: trio.Event = field(init=False, factory=trio.Event)
    _has_hello: trio.Event = field(init=False, factory=trio.Event)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait at the engine process: this process's, and those of others as of its last answer."""
        return self.own_tokens + self._others_tokens

    @property
    def waiting_rows(self) -> int:
        """Rows that were sent by this process and are not finished."""
        return len(self._waiting)

    @property
    def stall_reason(self) -> str:
        """Why nothing comes back from the engine process though it is ready; empty if it does."""
        if self.hello is None:
            return ""
        silent_s = time.perf_counter() - self._last_heard
        if silent_s > self.stall_timeout_s:
            return f"the engine process has been silent for {silent_s:.0f} s"
        return self._stall_reason

    def send_nowait(self, entry: QueueEntry) -> None:
        """Send a row soon; its entry is settled on the loop."""
        number = entry.number = next(self._numbers)
        self._waiting[number] = self._unsent[number] = entry
        self.own_tokens += entry.request.tokens
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

    def _settle(self, number: int) -> QueueEntry | None:
        entry = self._waiting.pop(number, None)
        if entry is not None:
            self.own_tokens -= entry.request.tokens
        return entry

    async def wait_ready(self) -> Hello:
        """Wait until the engine process is ready, and return its ``Hello``. Cancellation: at once."""
        while self.hello is None:
            await self._has_hello.wait()
        return self.hello

    async def run(self) -> None:
        """Connect, send and receive, forever; reconnect when the engine process dies or the connection fails.

        Cancellation: at once; every row fails with ``EngineDeadError``.
        """
        while True:
            try:
                stream = await trio.open_unix_socket(self.path)
            except (ConnectionRefusedError, FileNotFoundError):
                # The process that restarts engine processes is ending, and will end this one.
                await trio.sleep_forever()
            except OSError as error:
                logger.warning("no connection to the engine process at %s: %s", self.path, error)
                await trio.sleep(RECONNECT_S)
                continue
            try:
                await self._exchange(FramedStream(stream, FromEngine))
            except Exception:
                # A group from the nursery; with a cancellation in it, it would be no Exception.
                logger.exception("a connection to an engine process failed")
            finally:
                self._fail_waiting()
                await stream.aclose()
            await trio.sleep(RECONNECT_S)

    async def _exchange(self, stream: FramedStream[FromEngine]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, stream)
                while (received := await stream.receive()) is not None:
                    message, payload = received
                    self._last_heard = time.perf_counter()
                    match message:
                        case Hello():
                            self.hello = message
                            self._has_hello.set()
                        case Answers():
                            await self._deliver(message, payload)
                nursery.cancel_scope.cancel(reason="the engine process is gone")
        except* trio.BrokenResourceError:
            logger.debug("the engine process has died while rows were sent to it")

    def _fail_waiting(self) -> None:
        """Fail all rows that wait, and forget the state of the engine process."""
        self.hello = None
        if self._has_hello.is_set():  # else tasks may wait for it
            self._has_hello = trio.Event()
        self._unsent.clear()
        self._withdrawn.clear()
        self._closed_scopes.clear()
        self.scopes.clear()
        self._others_tokens, self.tokens_per_s, self._stall_reason = 0, 0.0, ""
        self.seconds_per_token = UNKNOWN
        for number in list(self._waiting):
            entry = self._settle(number)
            if entry is not None:
                entry.fail(EngineProcessDiedError("The engine process has died; another one is being started."))

    async def _send(self, stream: FramedStream[FromEngine]) -> None:
        """Send what has accumulated since the last frame, forever."""
        await self.wait_ready()
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            unsent, self._unsent = self._unsent, {}
            withdrawn, self._withdrawn = self._withdrawn, []
            closed, self._closed_scopes = self._closed_scopes, []
            await self._send_rows(stream, unsent)
            if withdrawn:
                await stream.send(Withdraw(withdrawn))
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
        for part, payload in parts_of(message.parts, frame_payload):
            answers = read_answers(part, payload)
            if isinstance(answers, PoolServeError):
                for number in part.ids:
                    if (failed := self._settle(number)) is not None:
                        failed.fail(answers)
                        self._fail_planned_with(failed, answers)
            else:
                for number, output in zip(part.ids, answers, strict=True):
                    if (entry := self._waiting.get(number)) is not None:
                        outcomes.append((entry, output))
        for index, together in enumerate(by_submitter(outcomes), start=1):
            if waiting := [outcome for outcome in together if self._settle(outcome[0].number) is not None]:
                finish_together(waiting)
            if index % SUBMITTERS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
        self.tokens_per_s, self._stall_reason = message.tokens_per_s, message.stall_reason
        self.seconds_per_token = np.frombuffer(message.seconds_per_token, np.float64)
        self._others_tokens = max(0, message.waiting_tokens - self.own_tokens)

    def __repr__(self) -> str:
        state = "stalled" if self.stall_reason else "ready" if self.hello else "not ready"
        return f"<Link {self.path.name}, {state}, {self.waiting_rows} rows, {self.waiting_tokens} tokens>"

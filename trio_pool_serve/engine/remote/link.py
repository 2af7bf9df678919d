"""The asking end of the wire: one connection to one engine process, made again whenever it breaks."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import trio
from attrs import define, field

from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.engine.remote.wire import (
    Answers,
    CloseScope,
    Frame,
    FromEngine,
    Hello,
    RemoteScope,
    Submit,
    Withdraw,
    add_row,
    parts_of,
    read_answer,
)
from trio_pool_serve.errors import EngineDeadError, UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput

logger = logging.getLogger(__name__)

DELIVERY_SLICE = 64
"""Rows delivered between two checkpoints, as ``LocalEngine`` does."""

RECONNECT_S = 0.1
"""Pause before the next connection, so that a process that breaks each of them is not busy with that alone."""


@define(eq=False)
class Link:
    """One engine process, as the processes see it that have rows computed there.

    The socket's file belongs to the process that keeps engine processes alive, and goes on listening while there is
    none: to connect is to wait for the next one.
    """

    path: Path
    hello: Hello | None = field(default=None, init=False)
    """What the process has loaded; ``None`` while there is none that is ready."""
    tokens_per_s: float = field(default=0.0, init=False)
    own_tokens: int = field(default=0, init=False)
    """Of the rows that were sent from here and are not done."""
    scopes: set[RemoteScope] = field(init=False, factory=set)
    _others_tokens: int = field(default=0, init=False)
    _numbers: Iterator[int] = field(init=False, factory=itertools.count)
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    _number_of: dict[QueueEntry, int] = field(init=False, factory=dict)
    _unsent: dict[int, QueueEntry] = field(init=False, factory=dict)
    _withdrawn: list[int] = field(init=False, factory=list)
    _closed_scopes: list[int] = field(init=False, factory=list)
    _something: trio.Event = field(init=False, factory=trio.Event)
    _greeted: trio.Event = field(init=False, factory=trio.Event)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the process has before it: what was sent from here, and what others had sent it lately."""
        return self.own_tokens + self._others_tokens

    @property
    def waiting_rows(self) -> int:
        """Rows that were sent from here and are not done."""
        return len(self._waiting)

    def send_nowait(self, entry: QueueEntry) -> None:
        """Have a row computed; its entry is finished or failed on the loop."""
        number = next(self._numbers)
        self._waiting[number] = self._unsent[number] = entry
        self._number_of[entry] = number
        self.own_tokens += entry.request.tokens
        self._something.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row back; nothing if it is done."""
        number = self._number_of.get(entry)
        if number is None:
            return
        self._settle(number)
        if self._unsent.pop(number, None) is None:
            self._withdrawn.append(number)
            self._something.set()

    def open_scope(self) -> RemoteScope:
        """Return a new place for one request's queries; it is gone with the process."""
        scope = RemoteScope(next(self._numbers), self._close_scope)
        self.scopes.add(scope)
        return scope

    def _close_scope(self, scope: RemoteScope) -> None:
        if scope in self.scopes:
            self.scopes.remove(scope)
            self._closed_scopes.append(scope.number)
            self._something.set()

    def _settle(self, number: int) -> QueueEntry | None:
        entry = self._waiting.pop(number, None)
        if entry is not None:
            del self._number_of[entry]
            self.own_tokens -= entry.request.tokens
        return entry

    async def wait_greeted(self) -> Hello:
        """Wait until the process is ready, and return what it has loaded. Cancellation: at once."""
        while self.hello is None:
            await self._greeted.wait()
        return self.hello

    async def run(self) -> None:
        """Connect, send and receive, and again whenever the process dies or the connection fails: for ever.

        Cancellation: at once; every row fails with ``EngineDeadError``.
        """
        while True:
            try:
                stream = await trio.open_unix_socket(self.path)
            except (ConnectionRefusedError, FileNotFoundError):
                # The process that keeps engine processes alive is ending, and this process with it.
                await trio.sleep_forever()
            except OSError as error:
                logger.warning("no connection to the engine process at %s: %s", self.path, error)
                await trio.sleep(RECONNECT_S)
                continue
            try:
                await self._converse(FramedStream(stream, FromEngine))
            except Exception:
                # A group, as it comes out of the nursery; a cancellation makes it another type.
                logger.exception("a connection to an engine process failed")
            finally:
                self._lose()
                await stream.aclose()
            await trio.sleep(RECONNECT_S)

    async def _converse(self, stream: FramedStream[FromEngine]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, stream)
                while (received := await stream.receive()) is not None:
                    message, behind = received
                    match message:
                        case Hello():
                            self.hello = message
                            self._greeted.set()
                        case Answers():
                            await self._deliver(message, behind)
                nursery.cancel_scope.cancel(reason="the engine process is gone")
        except* trio.BrokenResourceError:
            logger.debug("the engine process has gone while rows were sent to it")

    def _lose(self) -> None:
        """Fail whatever waits: the process that knew of it is gone."""
        self.hello = None
        if self._greeted.is_set():  # else it may be waited for
            self._greeted = trio.Event()
        self._unsent.clear()
        self._withdrawn.clear()
        self._closed_scopes.clear()
        self.scopes.clear()
        self._others_tokens, self.tokens_per_s = 0, 0.0
        for number in list(self._waiting):
            entry = self._settle(number)
            if entry is not None:
                entry.fail(EngineDeadError("The engine process has died; another one takes its place."))

    async def _send(self, stream: FramedStream[FromEngine]) -> None:
        """Send whatever has come together since the last frame, for ever."""
        await self.wait_greeted()
        while True:
            await self._something.wait()
            self._something = trio.Event()
            unsent, self._unsent = self._unsent, {}
            withdrawn, self._withdrawn = self._withdrawn, []
            closed, self._closed_scopes = self._closed_scopes, []
            await self._send_rows(stream, unsent)
            if withdrawn:
                await stream.send(Withdraw(withdrawn))
            for scope in closed:
                await stream.send(CloseScope(scope))

    async def _send_rows(self, stream: FramedStream[FromEngine], unsent: dict[int, QueueEntry]) -> None:
        frame = Frame()
        for number, entry in unsent.items():
            try:
                add_row(frame, number, entry.request)
            except UnsendableError as error:
                logger.error("a row failed: %s", error)  # noqa: TRY400
                self._settle(number)
                entry.fail(error)
            if frame.is_full:
                await stream.send(Submit(frame.parts), frame.buffers)
                frame = Frame()
        if frame.parts:
            await stream.send(Submit(frame.parts), frame.buffers)

    async def _deliver(self, message: Answers, behind: memoryview) -> None:
        for index, (part, payload) in enumerate(parts_of(message.rows, behind), start=1):
            entry = self._settle(part.id)
            if entry is not None:
                outcome = read_answer(part, payload)
                if isinstance(outcome, PoolingOutput):
                    entry.finish(outcome)
                else:
                    entry.fail(outcome)
            if index % DELIVERY_SLICE == 0:
                await trio.lowlevel.checkpoint()
        self.tokens_per_s = message.tokens_per_s
        self._others_tokens = max(0, message.waiting_tokens - self.own_tokens)

    def __repr__(self) -> str:
        state = "ready" if self.hello else "not ready"
        return f"<Link {self.path.name}, {state}, {self.waiting_rows} rows, {self.waiting_tokens} tokens>"

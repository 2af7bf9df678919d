"""The server side of an engine process: one device, shared by the API processes that connect, by TCP with its key.

Admission and the order between clients are up to the API processes, which send a batch when they have a credit for it.
Credits do not expire: a credit returns with the answers to its batch, or when the connection ends.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import trio
from attrs import Factory, define, field

from trio_pool_serve.engine.admission import COMES_AGAIN
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.frames import Frame, ReceivedPart, received_parts, require_valid
from trio_pool_serve.engine.remote.greeting import LinkKeys, answer_greeting
from trio_pool_serve.engine.remote.joiner import Joiner, SentBatch
from trio_pool_serve.engine.remote.link import HEARTBEATS_IN_TIMEOUT, LinkRefusedError, keep_calling, run_link
from trio_pool_serve.engine.remote.parts import NumberedOutcome, answer_frames, read_rows
from trio_pool_serve.engine.remote.wire import (
    CREDITS,
    MAX_SHARE,
    Answers,
    Done,
    Heartbeat,
    Hello,
    Leaving,
    QueueState,
    Submit,
    ToEngine,
    Withdraw,
)
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream


@define(eq=False, repr=False)
class DeviceServer(Worker):
    """A worker that computes the batches of API processes, which share its device."""

    zone: str = field(default="", kw_only=True)
    about: Mapping[str, object] = field(init=False, factory=dict)
    """Further fields of ``Hello``, for engines that serve other machines."""
    is_leaving: bool = field(init=False, default=False)
    """Whether API processes must send no more rows, and disconnect once all of their rows are answered."""
    joiner: Joiner = field(init=False, factory=Joiner)
    dispatcher: Dispatcher = field(
        init=False,
        default=Factory(lambda self: Dispatcher(self.joiner, self.metrics.busy, self._note_computed), takes_self=True),
    )
    connections: "dict[ApiConnection, None]" = field(init=False, factory=dict)
    computed_tokens: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.metrics.add_gauges(lambda: self.statistics().gauges())

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one API process until it disconnects. Cancellation: at once; its batches are withdrawn."""
        await ApiConnection(self, FramedStream(stream, ToEngine)).serve()

    @property
    def most_batches(self) -> int:
        """Maximum batches that an API process may have here at a time, planned ones included."""
        facts = self.facts
        return CREDITS * facts.concurrent_launches + max(facts.concurrent_launches, facts.background_launches)

    @property
    def budget(self) -> int:
        """The current token budget of a batch."""
        assert self.device is not None  # noqa: S101  (the model is loaded before API processes connect)
        return self.device.budget.tokens

    def _note_computed(self, batch: InFlightBatch) -> None:
        self.computed_tokens += batch.batch.tokens
        token_s = batch.device_s / batch.batch.tokens
        for entry in batch.entries:  # a share of the pass, whose time other processes' rows have taken as well
            entry.holder.device_s += token_s * entry.tokens

    def __repr__(self) -> str:
        return f"<DeviceServer {self.state}, {self.joiner!r}, {len(self.connections)} API processes>"


logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Longest pause between two messages to an API process."""


@define(eq=False)
class ApiConnection:
    """The connection of one API process; when it ends, its batches are withdrawn.

    An exception ends only this connection, and a row that cannot be read or sent fails alone.
    """

    server: "DeviceServer"
    stream: FramedStream[ToEngine]
    timeout_s: float = math.inf
    """Seconds of silence after which the API process counts as lost."""
    queue: QueueState = field(init=False, factory=QueueState)
    """The latest state of the API process's queue."""
    batches: dict[int, SentBatch] = field(init=False, factory=dict)
    """Batches that are not answered, by number."""
    _waiting: dict[int, QueueEntry] = field(init=False, factory=dict)
    """Rows that are neither settled nor withdrawn, by number."""
    _outcomes: list[list[NumberedOutcome]] = field(init=False, factory=list)
    """Outcomes to send, of each pass together."""
    _done: list[Done] = field(init=False, factory=list)
    """Answered batches whose credits are to return with the next answers."""
    wakes: trio.Event = field(init=False, factory=trio.Event)
    """Set to send answers now, even if only the state of the device has changed."""

    async def serve(self) -> None:
        """Serve until the API process closes the connection. Cancellation: at once; its batches are withdrawn."""
        self.server.connections[self] = None
        timeout_s = min(self.server.config.stall_timeout_s, self.timeout_s)
        heartbeat_s = min(HEARTBEAT_S, timeout_s / HEARTBEATS_IN_TIMEOUT)
        beat = partial(keep_calling, heartbeat_s, lambda: self.wakes.set())
        try:
            if silence := await run_link(self.stream, self.timeout_s, "API process", self._receive, self._answer, beat):
                logger.warning("lost an API process, whose rows are withdrawn: %s", silence)
        finally:
            del self.server.connections[self]
            self._withdraw([*self._waiting])

    async def _receive(self, _: trio.Nursery, message: ToEngine, payload: memoryview) -> None:
        match message:
            case Submit():
                await self._submit(message, payload)
            case Heartbeat(queue):
                self._note_queue(queue)
            case Withdraw(ids):
                self._withdraw(ids)

    def _withdraw(self, ids: Sequence[int]) -> None:
        for number in ids:
            if (entry := self._waiting.pop(number, None)) is not None:
                self.server.joiner.withdraw(entry)

    async def _submit(self, message: Submit, payload: memoryview) -> None:
        facts = message.batch
        batch = self.batches.setdefault(facts.number, SentBatch(facts, self._settled))
        most = self.server.most_batches
        require_valid(len(self.batches) <= most, f"more than {most} unanswered batches were sent")
        require_valid(batch.arriving > 0, "a batch has the number of an unanswered batch")  # it would be queued twice
        for index, part in enumerate(received_parts(message.parts, payload)):
            if index:
                await trio.lowlevel.checkpoint()
            batch.arriving -= len(part.ids)
            require_valid(batch.arriving >= 0, "a batch has more rows than announced")
            self._read(part, batch)
        if not batch.arriving:
            self._note_queue(facts.queue)
            if self.server.joiner.tokens:
                await trio.lowlevel.checkpoint()  # batches that arrived before this one may be taken first
            if batch.rows:
                self.server.joiner.put_nowait(batch)

    def _note_queue(self, queue: QueueState) -> None:
        if queue.tokens > 2 * max(self.queue.tokens, self.server.budget):
            for each in self._others:  # their share of the device is smaller now
                each.wakes.set()
        self.queue = queue

    def _read(self, part: ReceivedPart, batch: SentBatch) -> None:
        try:
            requests = read_rows(part, batch.facts.number if batch.facts.is_planned else None)
        except UnsendableError as error:
            batch.left -= len(part.ids)
            self._finish(batch, [(number, error) for number in part.ids])
            return
        settle, now = batch.settle, time.perf_counter()
        entries = [
            QueueEntry(request, settle, now, number, holder=batch, tokens=len(request.prompt.token_ids))
            for number, request in zip(part.ids, requests, strict=True)
        ]
        self._waiting.update(zip(part.ids, entries, strict=True))
        batch.rows |= dict.fromkeys(entries)

    def _settled(self, batch: SentBatch, entries: Sequence[QueueEntry]) -> None:
        waiting = self._waiting  # without rows that were withdrawn
        self._finish(
            batch,
            [
                (entry.number, outcome)
                for entry in entries
                if waiting.pop(entry.number, None) is not None and (outcome := entry.output or entry.error)
            ],
        )

    def _finish(self, batch: SentBatch, outcomes: list[NumberedOutcome]) -> None:
        self._outcomes.append(outcomes)
        if not batch.left:
            del self.batches[batch.facts.number]
            self._done.append(Done(batch.facts.number, batch.device_s))
        self.wakes.set()

    @property
    def _others(self) -> Sequence["ApiConnection"]:
        """The connections of the other API processes."""
        return [each for each in self.server.connections if each is not self]

    @property
    def _others_share(self) -> float:
        """Tokens of other API processes computed per token that this one has admitted.

        They share by their clients, and while a server is overloaded, as much again arrives as is admitted. The share
        stays the same while all of them admit alike, as in a flood. The state of a process without a batch here is not
        current, so it counts only if it was more than a batch.
        """
        own, budget = self.queue, self.server.budget
        others = [each.queue for each in self._others if each.batches or each.queue.tokens > budget]
        shares = [min(each.clients / own.clients, COMES_AGAIN * each.tokens / max(1, own.tokens)) for each in others]
        return min(MAX_SHARE, sum(shares))

    async def _answer(self) -> None:
        """Send outcomes, forever; if there are none, heartbeats. Outcomes that arrive during a frame go into the next.

        If an engine process is silent, its event loop does not run, and the API process sends rows elsewhere.
        """
        server = self.server
        await self.stream.send(
            Hello.of(
                server.facts,
                zone=server.zone,
                resident_bytes=server.memory.resident_bytes,
                device_bytes=server.memory.device_bytes,
                **server.about,
            )
        )
        while True:
            if server.is_leaving:  # repeated with each message; the API process heeds the first
                await self.stream.send(Leaving())
            await self.wakes.wait()
            self.wakes = trio.Event()
            outcomes, done, self._outcomes, self._done = self._outcomes, self._done, [], []
            frames = [*answer_frames(outcomes)] or [Frame()]
            for frame in frames:
                await self.stream.send(
                    Answers(
                        frame.parts,
                        done if frame is frames[-1] else [],
                        server.budget,
                        server.computed_tokens,
                        self._others_share,
                        sum(each.queue.small_requests for each in self._others),
                        server.dispatcher.rates.latest,
                        server.stall_reason,
                    ),
                    frame.buffers,
                )


MAX_GREETING = 256
"""Maximum connections that have not finished their greeting. Beyond it, the oldest one of the address with the most is
closed."""

LOG_INTERVAL_S = 1.0
"""Refusals are logged at most once per interval: a port scanner may connect a thousand times."""


@define(eq=False)
class EngineListener:
    """The connections of an engine; a connection that is refused, silent or broken ends alone."""

    server: DeviceServer
    keys: LinkKeys
    refused: int = field(default=0, init=False)
    """Connections that were refused."""
    _greeting: dict[trio.CancelScope, str] = field(init=False, factory=dict)
    """The host at the other end of each greeting, in order of arrival."""
    _logged_at: float = field(default=-math.inf, init=False)
    _logged: int = field(default=0, init=False)
    """``refused`` at the latest log line."""

    async def serve_until(
        self, leaving: trio.Event, listeners: list[trio.SocketListener], drain_timeout_s: float = math.inf
    ) -> None:
        """Serve API processes until ``leaving`` is set, then until they have their answers or the timeout is over.

        Cancellation: at once; the connections are closed.
        """
        with trio.CancelScope() as limit:
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as listening:
                    listening.start_soon(
                        partial(trio.serve_listeners, self.serve, listeners, handler_nursery=connections)
                    )
                    await leaving.wait()
                    listening.cancel_scope.cancel(reason="the process is to end")
                self.server.is_leaving = True
                for connection in self.server.connections:
                    connection.wakes.set()
                limit.deadline = trio.current_time() + drain_timeout_s
        if limit.cancelled_caught:
            logger.warning("exiting with %d rows unfinished", self.server.statistics().queued_rows)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends. Cancellation: at once; its rows leave the queue."""
        peer = _peer_of(stream)
        async with stream:
            try:
                greeted = await self._greet(stream, peer.partition(" port")[0])
            except LinkRefusedError as error:
                self.refused += 1
                if (now := trio.current_time()) - self._logged_at >= LOG_INTERVAL_S:
                    logger.warning(
                        "refused a connection from %s: %s (%d since the last such line)",
                        *(peer, error, self.refused - self._logged),
                    )
                    self._logged_at, self._logged = now, self.refused
                return
            except trio.BrokenResourceError:
                return  # a probe of the port, or too many
            logger.info("an API process at %s connected", peer)
            try:
                await ApiConnection(self.server, *greeted).serve()
            finally:
                logger.info("an API process at %s disconnected", peer)

    async def _greet(self, stream: trio.SocketStream, host: str) -> tuple[FramedStream[ToEngine], float]:
        """Return and raise as ``answer_greeting``. If too many greetings are unfinished, the oldest connection ends."""
        with trio.CancelScope() as scope:
            self._greeting[scope] = host
            if len(self._greeting) > MAX_GREETING:
                ((most, _),) = Counter(self._greeting.values()).most_common(1)
                oldest = next(each for each, address in self._greeting.items() if address == most)
                oldest.cancel(reason="too many connections have not finished their greeting")
            try:
                return await answer_greeting(stream, self.keys.keys)
            finally:
                del self._greeting[scope]
        raise trio.BrokenResourceError("too many connections have not finished their greeting")


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # it has disconnected
        return "an unknown address"
    return f"{host} port {port}"

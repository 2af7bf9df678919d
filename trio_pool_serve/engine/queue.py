"""Rows that wait, and which of them go next.

A clock counts the tokens taken from the queue. A row is due once ``PATIENCE`` times the tokens of its flow that wait
before it, and its own, have been taken since it came: so short rows go before long ones, and a single row before the
rest of a large request. Of the rows of the smallest priority the one that is due first opens a batch; those nearest to
its length fill it. What comes after a row is due never opens a batch before it, so nothing starves. Bulk, which is long
rows and the rest of large requests, rides apart and in short batches while small requests come, be it to another
replica of the model.

Nothing is sorted for this. Rows are filed in lanes by length and by how long they can wait, rounded up to a power of
two: within a lane they are due in the order in which they came.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import trio
from attrs import Factory, define, field

from trio_pool_serve.engine.batching import FREE_PADDING, BatchRoom, length_class
from trio_pool_serve.engine.small_requests import SmallRequests
from trio_pool_serve.types import Batch, PoolingOutput, PoolingRequest

PATIENCE = 8
"""Tokens taken in all to each of a flow's own, at most: a flow that always has rows waiting gets an eighth at least."""

BULK_TOKENS = 256
"""A row is bulk if more tokens of its flow than this wait with it, its own included."""

SMALL_REQUESTS_LAST = 4
"""Full batches' worth of tokens, without a small request among them, after which bulk gets full batches again."""


def _ignore(entry: "QueueEntry") -> None:
    """Tell nobody."""


@define(eq=False)
class QueueEntry:
    """One waiting row. ``settled(entry)`` is called on the loop once it is finished or has failed."""

    request: PoolingRequest
    settled: Callable[["QueueEntry"], None] = field(default=_ignore, repr=False)
    queued_at: float = field(factory=time.perf_counter)
    output: PoolingOutput | None = None
    error: Exception | None = None
    due: int = field(default=0, init=False)
    """By the clock of the queue, which sets it."""
    lane: "Lane | None" = field(default=None, init=False, repr=False)
    """Where it waits, while it waits."""

    @property
    def is_settled(self) -> bool:
        """Whether it is finished or has failed."""
        return self.output is not None or self.error is not None

    def finish(self, output: PoolingOutput) -> None:
        """Hand over the row."""
        self.output = output
        self.settled(self)

    def fail(self, error: Exception) -> None:
        """Hand over what it failed by."""
        self.error = error
        self.settled(self)


@define(eq=False)
class Lane:
    """Entries of one priority and about one length that can wait equally long, in the order in which they came."""

    priority: int
    length: int
    can_wait: int
    entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)

    @property
    def first(self) -> QueueEntry:
        """The entry that is due first."""
        return next(iter(self.entries))

    @property
    def is_bulk(self) -> bool:
        """Whether its entries are long rows, or come after many of their flow."""
        return self.can_wait > PATIENCE * BULK_TOKENS


@define(eq=False)
class Flow:
    """What one request has waiting: how many rows, and when the last of them is due, not rounded."""

    rows: int = 0
    due: int = 0


@define(eq=False)
class RequestQueue:
    """Entries, by priority and then by when they are due. Withdrawn entries leave at once.

    A memory channel would not do: nothing can be taken out of its middle.
    """

    pads: bool = True
    """Whether the device computes padding."""
    small_requests: SmallRequests = Factory(SmallRequests)
    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows."""
    clock: int = field(default=0, init=False)
    """Tokens of all rows that have been taken."""
    _rows: int = field(default=0, init=False)
    _lanes: dict[tuple[int, int, int], Lane] = field(init=False, factory=dict)
    _flows: dict[int, Flow] = field(init=False, factory=dict)
    _small_requests_seen: int = field(init=False)
    _small_request_at: int | None = field(default=None, init=False)
    _not_empty: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._small_requests_seen = self.small_requests.total

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the entries, in no order that means anything."""
        for lane in self._lanes.values():
            yield from lane.entries

    def put_nowait(self, entry: QueueEntry) -> None:
        """Add an entry."""
        request = entry.request
        flow = self._flows.setdefault(request.flow, Flow()) if request.flow else Flow()
        flow.rows += 1
        flow.due = max(flow.due, self.clock) + PATIENCE * request.tokens
        can_wait = 1 << (flow.due - self.clock - 1).bit_length()
        key = (request.priority, length_class(request.tokens), can_wait)
        if key not in self._lanes:
            self._lanes[key] = Lane(*key)
        entry.due = self.clock + can_wait
        entry.lane = self._lanes[key]
        entry.lane.entries[entry] = None
        self._rows += 1
        self.tokens += request.tokens
        self._not_empty.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out; one that is not waiting any more is let be."""
        if (lane := entry.lane) is None:
            return
        entry.lane = None
        del lane.entries[entry]
        if not lane.entries:
            del self._lanes[lane.priority, lane.length, lane.can_wait]
        if flow := self._flows.get(entry.request.flow):
            flow.rows -= 1
            if not flow.rows:
                del self._flows[entry.request.flow]
        self._rows -= 1
        self.tokens -= entry.request.tokens

    def take_batch(self, max_tokens: int, bulk_tokens: int | None = None) -> list[QueueEntry]:
        """Take entries whose padded tokens stay within ``max_tokens``, at least one if any; the first opens it.

        While small requests come, those within ``bulk_tokens`` if they are bulk.
        """
        if not self._lanes:
            return []
        opening = min(self._lanes.values(), key=lambda lane: (lane.priority, lane.first.due))
        room = BatchRoom(max_tokens, free_padding=max_tokens // FREE_PADDING, pads=self.pads)
        lanes = list(self._lanes.values())
        if bulk_tokens is not None and self._small_requests_come(max_tokens):
            lanes = [lane for lane in lanes if lane.is_bulk == opening.is_bulk]
            room.max_tokens = min(max_tokens, bulk_tokens) if opening.is_bulk else max_tokens
        turns = [(lane.priority, abs(lane.length - opening.length), lane.first.due, i) for i, lane in enumerate(lanes)]
        heapq.heapify(turns)
        taken: list[QueueEntry] = []
        while turns and not room.is_full:
            priority, distance, _, index = turns[0]
            lane = lanes[index]
            entry = lane.first
            if not room.try_add(entry.request.tokens):
                heapq.heappop(turns)
                continue
            self._take(entry, is_bulk=lane.is_bulk)
            taken.append(entry)
            if lane.entries:
                heapq.heapreplace(turns, (priority, distance, lane.first.due, index))
            else:
                heapq.heappop(turns)
        return taken

    def _take(self, entry: QueueEntry, *, is_bulk: bool) -> None:
        self.withdraw(entry)
        self.clock += entry.request.tokens
        if not is_bulk and entry.request.flow not in self._flows:
            self.small_requests.count()

    def _small_requests_come(self, max_tokens: int) -> bool:
        if (total := self.small_requests.total) != self._small_requests_seen:
            self._small_requests_seen, self._small_request_at = total, self.clock
        last = self._small_request_at
        return last is not None and self.clock - last <= SMALL_REQUESTS_LAST * max_tokens

    async def wait_not_empty(self) -> None:
        """Wait for an entry. Cancellation: at once; nothing is taken."""
        while not self._lanes:
            self._not_empty = trio.Event()
            await self._not_empty.wait()

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self)} rows, {self.tokens} tokens>"


def batch_of(entries: list[QueueEntry]) -> Batch:
    """Return the batch that computes these entries, row for row."""
    return Batch(tuple(entry.request for entry in entries))

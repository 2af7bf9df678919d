"""Rows that wait, and which of them go next.

A clock counts the tokens taken from the queue. A row is virtual_deadline once ``FAIRNESS`` times the tokens of its group that wait
before it, and its own, have been taken since it came: so short rows go before long ones, and a single row before the
rest of a large request. Of the rows of the smallest priority the one that is virtual_deadline first opens a batch; those nearest to
its length fill it. What comes after a row is virtual_deadline never opens a batch before it, so nothing starves. Bulk, which is long
rows and the rest of large requests, rides apart and in short batches while small requests come, be it to another
replica of the model.

Nothing is sorted for this. Rows are filed in queue_classes by length and by how long they can wait, rounded up to a power of
two: within a queue_class they are virtual_deadline in the order in which they came.
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

FAIRNESS = 8
"""Tokens taken in all to each of a group's own, at most: a group that always has rows waiting gets an eighth at least."""

BULK_TOKENS = 256
"""A row is bulk if more tokens of its group than this wait with it, its own included."""

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
    virtual_deadline: int = field(default=0, init=False)
    """By the clock of the queue, which sets it."""
    queue_class: "QueueClass | None" = field(default=None, init=False, repr=False)
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
class QueueClass:
    """Entries of one priority and about one length that can wait equally long, in the order in which they came."""

    priority: int
    length: int
    wait_tokens: int
    entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)

    @property
    def first(self) -> QueueEntry:
        """The entry that is virtual_deadline first."""
        return next(iter(self.entries))

    @property
    def is_bulk(self) -> bool:
        """Whether its entries are long rows, or come after many of their group."""
        return self.wait_tokens > FAIRNESS * BULK_TOKENS


@define(eq=False)
class RequestGroup:
    """What one request has waiting: how many rows, and when the last of them is virtual_deadline, not rounded."""

    rows: int = 0
    virtual_deadline: int = 0


@define(eq=False)
class RequestQueue:
    """Entries, by priority and then by when they are virtual_deadline. Withdrawn entries leave at once.

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
    _queue_classes: dict[tuple[int, int, int], QueueClass] = field(init=False, factory=dict)
    _request_groups: dict[int, RequestGroup] = field(init=False, factory=dict)
    _small_requests_seen: int = field(init=False)
    _small_request_at: int | None = field(default=None, init=False)
    _not_empty: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._small_requests_seen = self.small_requests.total

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the entries, in no order that means anything."""
        for queue_class in self._queue_classes.values():
            yield from queue_class.entries

    def put_nowait(self, entry: QueueEntry) -> None:
        """Add an entry."""
        request = entry.request
        group = self._request_groups.setdefault(request.group, RequestGroup()) if request.group else RequestGroup()
        group.rows += 1
        group.virtual_deadline = max(group.virtual_deadline, self.clock) + FAIRNESS * request.tokens
        wait_tokens = 1 << (group.virtual_deadline - self.clock - 1).bit_length()
        key = (request.priority, length_class(request.tokens), wait_tokens)
        if key not in self._queue_classes:
            self._queue_classes[key] = QueueClass(*key)
        entry.virtual_deadline = self.clock + wait_tokens
        entry.queue_class = self._queue_classes[key]
        entry.queue_class.entries[entry] = None
        self._rows += 1
        self.tokens += request.tokens
        self._not_empty.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out; one that is not waiting any more is let be."""
        if (queue_class := entry.queue_class) is None:
            return
        entry.queue_class = None
        del queue_class.entries[entry]
        if not queue_class.entries:
            del self._queue_classes[queue_class.priority, queue_class.length, queue_class.wait_tokens]
        if group := self._request_groups.get(entry.request.group):
            group.rows -= 1
            if not group.rows:
                del self._request_groups[entry.request.group]
        self._rows -= 1
        self.tokens -= entry.request.tokens

    def take_batch(self, max_tokens: int, bulk_tokens: int | None = None) -> list[QueueEntry]:
        """Take entries whose padded tokens stay within ``max_tokens``, at least one if any; the first opens it.

        While small requests come, those within ``bulk_tokens`` if they are bulk.
        """
        if not self._queue_classes:
            return []
        opening = min(
            self._queue_classes.values(),
            key=lambda queue_class: (queue_class.priority, queue_class.first.virtual_deadline),
        )
        room = BatchRoom(max_tokens, free_padding=max_tokens // FREE_PADDING, pads=self.pads)
        queue_classes = list(self._queue_classes.values())
        if bulk_tokens is not None and self._small_requests_come(max_tokens):
            queue_classes = [queue_class for queue_class in queue_classes if queue_class.is_bulk == opening.is_bulk]
            room.max_tokens = min(max_tokens, bulk_tokens) if opening.is_bulk else max_tokens
        turns = [
            (queue_class.priority, abs(queue_class.length - opening.length), queue_class.first.virtual_deadline, i)
            for i, queue_class in enumerate(queue_classes)
        ]
        heapq.heapify(turns)
        taken: list[QueueEntry] = []
        while turns and not room.is_full:
            priority, distance, _, index = turns[0]
            queue_class = queue_classes[index]
            entry = queue_class.first
            if not room.try_add(entry.request.tokens):
                heapq.heappop(turns)
                continue
            self._take(entry, is_bulk=queue_class.is_bulk)
            taken.append(entry)
            if queue_class.entries:
                heapq.heapreplace(turns, (priority, distance, queue_class.first.virtual_deadline, index))
            else:
                heapq.heappop(turns)
        return taken

    def _take(self, entry: QueueEntry, *, is_bulk: bool) -> None:
        self.withdraw(entry)
        self.clock += entry.request.tokens
        if not is_bulk and entry.request.group not in self._request_groups:
            self.small_requests.count()

    def _small_requests_come(self, max_tokens: int) -> bool:
        if (total := self.small_requests.total) != self._small_requests_seen:
            self._small_requests_seen, self._small_request_at = total, self.clock
        last = self._small_request_at
        return last is not None and self.clock - last <= SMALL_REQUESTS_LAST * max_tokens

    async def wait_not_empty(self) -> None:
        """Wait for an entry. Cancellation: at once; nothing is taken."""
        while not self._queue_classes:
            self._not_empty = trio.Event()
            await self._not_empty.wait()

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self)} rows, {self.tokens} tokens>"


def batch_of(entries: list[QueueEntry]) -> Batch:
    """Return the batch that computes these entries, row for row."""
    return Batch(tuple(entry.request for entry in entries))

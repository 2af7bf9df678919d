"""The queue of rows: strict priorities, and weighted fair queueing between request groups of one priority.

The queue's clock counts the tokens taken from it. The virtual deadline of a row is the clock at its arrival plus
``FAIRNESS`` times the tokens of its request group that wait up to and including the row (virtual finish time in the
literature: Demers, Keshav and Shenker, SIGCOMM 1989). So a short row comes before a long one, and a single row before
the rest of a large request. A row that arrives after another row's virtual deadline never opens a batch before it, so
no row starves.

A batch is opened by the row with the lowest priority number, and of these by the one with the earliest virtual
deadline. It is filled with the rows nearest to it in length, which keeps padding low. While small requests arrive, at
this replica or another one of the model, bulk (long rows and the rest of large requests) has batches of its own, and
short ones: a small request does not wait for a full batch of bulk.

Nothing is sorted. Rows wait in queue classes, one for each priority, length class and wait: the tokens from arrival to
virtual deadline, rounded up to a power of two. All rows of a queue class wait equally long, so their virtual deadlines
are in order of arrival, and only the first row of each queue class is compared.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import trio
from attrs import Factory, define, field

from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, BatchBudget, length_class
from trio_pool_serve.engine.small_requests import SmallRequests
from trio_pool_serve.types import Batch, PoolingOutput, PoolingRequest

FAIRNESS = 8
"""Most tokens taken in all per token of one group: a group that always has rows waiting gets at least an eighth."""

BULK_TOKENS = 256
"""A row is bulk if more than this many tokens of its group wait up to and including it."""

MAX_TOKENS_BEFORE_LONG = 2048
"""Most tokens of long rows that wait while a thread, or a replica, is kept free for short ones."""

MAX_KEPT_TOGETHER = 8192
"""Most tokens of long rows that are kept together on account of earlier short rows."""

MAX_BATCHES_SINCE_SMALL = 4
"""Bulk gets full batches again once this many full batches of tokens were taken since the last small request."""


def _ignore(entry: "QueueEntry") -> None:
    """Default callback: does nothing."""


@define(eq=False)
class QueueEntry:
    """One row in the queue. ``settled(entry)`` is called on the loop once the row is finished or has failed."""

    request: PoolingRequest
    settled: Callable[["QueueEntry"], None] = field(default=_ignore, repr=False)
    queued_at: float = field(factory=time.perf_counter)
    output: PoolingOutput | None = None
    error: Exception | None = None
    is_abandoned: bool = field(default=False, init=False)
    """Nobody waits for the row any more: if it has been launched, it is not computed again."""
    virtual_deadline: int = field(default=0, init=False)
    """In tokens on the queue's clock; set by the queue."""
    queue_class: "QueueClass | None" = field(default=None, init=False, repr=False)
    """Set while the row waits."""

    @property
    def is_settled(self) -> bool:
        """Whether the row is finished or has failed."""
        return self.output is not None or self.error is not None

    def finish(self, output: PoolingOutput) -> None:
        """Set the output and call ``settled``."""
        self.output = output
        self.settled(self)

    def fail(self, error: Exception) -> None:
        """Set the error and call ``settled``."""
        self.error = error
        self.settled(self)


@define(eq=False)
class QueueClass:
    """Entries of one priority, about one length and one wait (tokens to the virtual deadline), in order of arrival."""

    priority: int
    length: int
    wait_tokens: int
    entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)

    @property
    def first(self) -> QueueEntry:
        """The entry with the earliest virtual deadline."""
        return next(iter(self.entries))

    @property
    def is_bulk(self) -> bool:
        """Whether its entries are long rows, or follow many tokens of their group."""
        return self.wait_tokens > FAIRNESS * BULK_TOKENS


@define(eq=False)
class RequestGroup:
    """The waiting rows of one request: their number, and the virtual deadline of the last one, not rounded."""

    rows: int = 0
    virtual_deadline: int = 0


@define(eq=False)
class RequestQueue:
    """Waiting entries, taken by priority and virtual deadline. Withdrawn entries leave at once.

    Not a memory channel: entries cannot be withdrawn from the middle of one.
    """

    pads: bool = True
    """Whether the device computes padding."""
    small_requests: SmallRequests = Factory(SmallRequests)
    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows."""
    clock: int = field(default=0, init=False)
    """Tokens of all rows that have been taken."""
    _rows: int = field(default=0, init=False)
    _classes: dict[tuple[int, int, int], QueueClass] = field(init=False, factory=dict)
    _groups: dict[int, RequestGroup] = field(init=False, factory=dict)
    _small_requests_seen: int = field(init=False)
    _small_request_at: int | None = field(default=None, init=False)
    _long_tokens: int = field(default=0, init=False)
    """Tokens of the long rows that wait."""
    _kept_together: int = field(default=0, init=False)
    """Tokens of long rows that are still to be kept together."""
    _change: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._small_requests_seen = self.small_requests.total

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the waiting entries, in no particular order."""
        for waiting in self._classes.values():
            yield from waiting.entries

    def put_nowait(self, entry: QueueEntry) -> None:
        """Add an entry."""
        request = entry.request
        group = self._groups.setdefault(request.group, RequestGroup()) if request.group else RequestGroup()
        group.rows += 1
        group.virtual_deadline = max(group.virtual_deadline, self.clock) + FAIRNESS * request.tokens
        wait_tokens = 1 << (group.virtual_deadline - self.clock - 1).bit_length()
        key = (request.priority, length_class(request.tokens), wait_tokens)
        if key not in self._classes:
            self._classes[key] = QueueClass(*key)
        entry.virtual_deadline = self.clock + wait_tokens
        entry.queue_class = self._classes[key]
        entry.queue_class.entries[entry] = None
        self._rows += 1
        self.tokens += request.tokens
        if is_long(request):
            self._long_tokens += request.tokens
        else:
            self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * request.tokens)
        self.note_change()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out of the queue; does nothing if it is not waiting."""
        if (waiting := entry.queue_class) is None:
            return
        entry.queue_class = None
        del waiting.entries[entry]
        if not waiting.entries:
            del self._classes[waiting.priority, waiting.length, waiting.wait_tokens]
        if group := self._groups.get(entry.request.group):
            group.rows -= 1
            if not group.rows:
                del self._groups[entry.request.group]
        self._rows -= 1
        self.tokens -= entry.request.tokens
        if is_long(entry.request):
            self._long_tokens -= entry.request.tokens

    def take_batch(
        self, max_tokens: int, bulk_tokens: int | None = None, *, leaves_long: bool = False
    ) -> list[QueueEntry]:
        """Take the entries of one batch, with at most ``max_tokens`` padded tokens; at least one entry if any waits.

        While small requests arrive, a batch of bulk has at most ``bulk_tokens``. With ``leaves_long``, long rows are
        left to the threads that compute such already, and maybe nothing is taken: as long as short rows are at least an
        eighth of all tokens, and not too many long ones wait.
        """
        classes = list(self._classes.values())
        if leaves_long and self._long_tokens <= min(self._kept_together, MAX_TOKENS_BEFORE_LONG):
            classes = [waiting for waiting in classes if not is_long(waiting.first.request)]
        if not classes:
            return []
        opening = min(classes, key=lambda waiting: (waiting.priority, waiting.first.virtual_deadline))
        budget = BatchBudget(max_tokens, free_padding=max_tokens // FREE_PADDING_DIVISOR, pads=self.pads)
        if bulk_tokens is not None and self._has_recent_small_requests(max_tokens):
            classes = [waiting for waiting in classes if waiting.is_bulk == opening.is_bulk]
            budget.max_tokens = min(max_tokens, bulk_tokens) if opening.is_bulk else max_tokens
        turns = [
            (waiting.priority, abs(waiting.length - opening.length), waiting.first.virtual_deadline, index)
            for index, waiting in enumerate(classes)
        ]
        heapq.heapify(turns)
        taken: list[QueueEntry] = []
        while turns and not budget.is_full:
            priority, distance, _, index = turns[0]
            waiting = classes[index]
            entry = waiting.first
            if not budget.try_add(entry.request.tokens):
                heapq.heappop(turns)
                continue
            self._take(entry, is_bulk=waiting.is_bulk)
            taken.append(entry)
            if waiting.entries:
                heapq.heapreplace(turns, (priority, distance, waiting.first.virtual_deadline, index))
            else:
                heapq.heappop(turns)
        return taken

    def _take(self, entry: QueueEntry, *, is_bulk: bool) -> None:
        self.withdraw(entry)
        self.clock += entry.request.tokens
        if is_long(entry.request):
            self._kept_together = max(0, self._kept_together - entry.request.tokens)
        if not is_bulk and entry.request.group not in self._groups:
            self.small_requests.increment()

    def _has_recent_small_requests(self, max_tokens: int) -> bool:
        if (total := self.small_requests.total) != self._small_requests_seen:
            self._small_requests_seen, self._small_request_at = total, self.clock
        last = self._small_request_at
        return last is not None and self.clock - last <= MAX_BATCHES_SINCE_SMALL * max_tokens

    async def wait_not_empty(self) -> None:
        """Wait until an entry waits. Cancellation: at once; nothing is taken."""
        while not self._classes:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until an entry is added, or ``note_change`` is called. Cancellation: at once; nothing is taken."""
        if self._change.is_set():  # else others wait for it already
            self._change = trio.Event()
        await self._change.wait()

    def note_change(self) -> None:
        """Wake those that wait for a batch: there may be another one to take."""
        self._change.set()

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self)} rows, {self.tokens} tokens>"


def is_long(request: PoolingRequest) -> bool:
    """Return whether a row takes so long that short ones should not wait behind it."""
    return request.tokens > BULK_TOKENS


def batch_of(entries: list[QueueEntry]) -> Batch:
    """Return the batch of these entries' rows, in their order."""
    return Batch(tuple(entry.request for entry in entries))

"""The queue of rows: clients take turns, and so do the request groups of one client.

Of clients the one of which the fewest tokens have been taken, since it began to wait, opens the next batch: each gets
an equal share of the tokens, however many rows it has waiting (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM
1996). ``rank`` comes before that, for the few clients that may outrank others.

Of one client's rows those with the lowest priority number come first, and of these the one with the earliest virtual
deadline. The clock of a client counts the tokens taken of it. The virtual deadline of a row is the clock at its arrival
plus ``FAIRNESS`` times the tokens of its request group that wait up to and including the row (virtual finish time:
Demers, Keshav and Shenker, SIGCOMM 1989). So a short row comes before a long one, and a single row before the rest of a
large request. A row that arrives after another's virtual deadline opens no batch before it, so no row starves.

Every second batch is opened by a row that has waited for ``max_age_s``, if any has, whatever its rank and priority. A
batch is filled with the rows nearest in length to the one that opens it, which keeps padding low. While small requests
arrive, at this replica or another one of the model, bulk (long rows and the rest of large requests) has batches of its
own, and short ones: a small request does not wait for a full one.

Nothing is sorted. Rows wait in queue classes, one for each client, priority, length class and wait: the tokens from
arrival to virtual deadline, rounded up to a power of two. All rows of a queue class wait equally long, so their virtual
deadlines are in order of arrival, and only the first row of each queue class is compared.
"""

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import trio
from attrs import Factory, define, field

from trio_pool_serve.engine.background_queue import BackgroundQueue
from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, BatchBudget, length_class
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.small_requests import SmallRequests
from trio_pool_serve.types import Batch, PoolingRequest

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

MAX_CLIENTS_OF_BATCH = 64
"""Clients whose rows are compared for one batch: those whose turn it is soonest."""


ClassKey: TypeAlias = tuple[int, int, int, int]
"""Rank, priority, length class and wait."""


@define(eq=False)
class WaitingClient:
    """A client that has rows waiting: the ``turn``-th that began to wait.

    ``virtual_time``, its clock, is where it began, plus the tokens taken of it since.
    """

    number: int
    turn: int
    virtual_time: int
    classes: "dict[ClassKey, QueueClass]" = field(init=False, factory=dict)

    @property
    def rank(self) -> int:
        """The rank of its most urgent rows."""
        return min(rank for rank, *_ in self.classes)


@define(eq=False)
class QueueClass:
    """Entries of one client, rank and priority, about one length and one wait (tokens to the virtual deadline).

    In order of arrival.
    """

    client: WaitingClient
    rank: int
    priority: int
    length: int
    wait_tokens: int
    entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)
    is_bulk: bool = field(init=False)
    """Whether its entries are long rows, or follow many tokens of their group."""

    @is_bulk.default
    def _follows_many(self) -> bool:
        return self.wait_tokens > FAIRNESS * BULK_TOKENS

    @property
    def first(self) -> QueueEntry:
        """The entry with the earliest virtual deadline."""
        return next(iter(self.entries))


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
    max_age_s: float = math.inf
    small_requests: SmallRequests = Factory(SmallRequests)
    background: BackgroundQueue = field(init=False, factory=BackgroundQueue)
    """Planned batches, which do not count as waiting rows."""
    takes_background: bool = field(default=True, init=False)
    """Whether ``take_batch`` takes these when no rows wait. Otherwise they are taken from ``background``."""
    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows."""
    clock: int = field(default=0, init=False)
    """Tokens of all rows that have been taken."""
    _entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)
    """In order of arrival."""
    _clients: dict[int, WaitingClient] = field(init=False, factory=dict)
    _virtual_time: int = field(default=0, init=False)
    """The least of the clients that waited when a batch had been taken: where clients begin."""
    _turns: Iterator[int] = field(init=False, factory=itertools.count)
    _groups: dict[int, RequestGroup] = field(init=False, factory=dict)
    _opened_old: bool = field(default=False, init=False)
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
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the waiting entries, in order of arrival; last those of background work."""
        return itertools.chain(self._entries, self.background)

    def put_nowait(self, *entries: QueueEntry) -> None:
        """Add entries."""
        groups, arrived = self._groups, self._entries
        short_tokens = long_tokens = 0
        for entry in entries:
            request = entry.request
            if request.planned is not None:
                self.background.put_nowait(entry, request.planned.number)
                continue
            tokens = entry.tokens = len(request.prompt.token_ids)
            clock = (client := self._client_of(request)).virtual_time
            group = groups.get(request.group) or self._open_group(request.group)
            group.rows += 1
            wait = FAIRNESS * tokens
            if group.virtual_deadline > clock:
                wait += group.virtual_deadline - clock
            group.virtual_deadline = clock + wait
            wait_tokens = 1 << (wait - 1).bit_length()
            entry.virtual_deadline = clock + wait_tokens
            entry.queue_class = waiting = self._class_of(client, request, tokens, wait_tokens)
            waiting.entries[entry] = arrived[entry] = None
            if tokens > BULK_TOKENS:
                long_tokens += tokens
            else:
                short_tokens += tokens
        self.tokens += short_tokens + long_tokens
        self._long_tokens += long_tokens
        self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * short_tokens)
        self.note_change()

    def _open_group(self, number: int) -> RequestGroup:
        group = RequestGroup()
        if number:
            self._groups[number] = group
        return group

    def _client_of(self, request: PoolingRequest) -> WaitingClient:
        number = request.client
        if number not in self._clients:
            self._clients[number] = WaitingClient(number, next(self._turns), self._virtual_time)
        return self._clients[number]

    def _class_of(self, client: WaitingClient, request: PoolingRequest, tokens: int, wait_tokens: int) -> QueueClass:
        key = (request.rank, request.priority, length_class(tokens), wait_tokens)
        waiting = client.classes.get(key)
        if waiting is None:
            waiting = client.classes[key] = QueueClass(client, *key)
        return waiting

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out of the queue; does nothing if it is not waiting."""
        if entry.queue_class is not None:
            self._remove([entry])
        elif entry.request.planned is not None:
            self.background.withdraw(entry.request.planned.number)

    def _remove(self, entries: Sequence[QueueEntry]) -> int:
        """Take waiting entries out of the queue; return of how many small requests no rows are left."""
        groups, arrived = self._groups, self._entries
        long_tokens = tokens = ended = 0
        for entry in entries:
            waiting = entry.queue_class
            assert waiting is not None  # noqa: S101  (it waits)
            entry.queue_class = None
            del waiting.entries[entry], arrived[entry]
            if not waiting.entries:
                self._drop(waiting)
            number = entry.request.group
            if (group := groups.get(number)) is not None:
                group.rows -= 1
                if not group.rows:
                    del groups[number]
                    ended += not waiting.is_bulk
            else:
                ended += not waiting.is_bulk
            tokens += entry.tokens
            if entry.tokens > BULK_TOKENS:
                long_tokens += entry.tokens
        self.tokens -= tokens
        self._long_tokens -= long_tokens
        return ended

    def _drop(self, waiting: QueueClass) -> None:
        client = waiting.client
        del client.classes[waiting.rank, waiting.priority, waiting.length, waiting.wait_tokens]
        if not client.classes:
            del self._clients[client.number]

    def take_batch(
        self, max_tokens: int, bulk_tokens: int | None = None, *, leaves_long: bool = False
    ) -> list[QueueEntry]:
        """Take the entries of one batch, with at most ``max_tokens`` padded tokens; at least one entry if any waits.

        While small requests arrive, a batch of bulk has at most ``bulk_tokens``. With ``leaves_long``, long rows are
        left to the threads that compute such already, and maybe nothing is taken: as long as short rows are at least an
        eighth of all tokens, and not too many long ones wait.
        """
        leaves_long = leaves_long and self._long_tokens <= min(self._kept_together, MAX_TOKENS_BEFORE_LONG)
        classes = self._classes_in_turn(leaves_long=leaves_long)
        opening = self._opening(classes, leaves_long=leaves_long)
        if opening is None:  # while long rows are left to other threads, this one is kept free
            return self.background.take_batch() if self.takes_background and not self._entries else []
        free_padding = max_tokens // FREE_PADDING_DIVISOR
        if bulk_tokens is not None and self._has_recent_small_requests(max_tokens):
            classes = [waiting for waiting in classes if waiting.is_bulk == opening.is_bulk]
            max_tokens = min(max_tokens, bulk_tokens) if opening.is_bulk else max_tokens
        budget = BatchBudget(max_tokens, free_padding, pads=self.pads)
        taken = [opening.first]
        budget.try_add(taken[0].tokens)
        self._note_taken(taken)
        opening.client.virtual_time += taken[0].tokens
        filling = self._fill(budget, opening, [waiting for waiting in classes if waiting.entries])
        self._note_taken(filling)
        taken += filling
        least = min((client.virtual_time for client in self._clients.values()), default=opening.client.virtual_time)
        self._virtual_time = max(self._virtual_time, least)
        return taken

    def _classes_in_turn(self, *, leaves_long: bool) -> list[QueueClass]:
        """Return the queue classes of the clients whose turn it is, those of short rows with ``leaves_long``."""
        clients: Iterable[WaitingClient] = self._clients.values()
        if len(self._clients) > MAX_CLIENTS_OF_BATCH:
            clients = heapq.nsmallest(
                MAX_CLIENTS_OF_BATCH, clients, key=lambda client: (client.rank, client.virtual_time)
            )
        classes = [waiting for client in clients for waiting in client.classes.values()]
        if leaves_long:
            classes = [waiting for waiting in classes if not is_long(waiting.first.request)]
        return classes

    def _opening(self, classes: list[QueueClass], *, leaves_long: bool) -> QueueClass | None:
        """Return the queue class whose first row opens the next batch."""
        oldest = next(iter(self._entries), None)
        if oldest is not None and not self._opened_old and time.perf_counter() - oldest.queued_at > self.max_age_s:
            self._opened_old = not (leaves_long and is_long(oldest.request))
            if self._opened_old:
                return oldest.queue_class
        self._opened_old = False
        return min(
            classes,
            key=lambda waiting: (
                waiting.rank,
                waiting.client.virtual_time,
                waiting.client.turn,
                waiting.priority,
                waiting.first.virtual_deadline,
            ),
            default=None,
        )

    def _fill(self, budget: BatchBudget, opening: QueueClass, classes: list[QueueClass]) -> list[QueueEntry]:
        """Return the rows nearest in length to those of ``opening``, in turns between clients, within the budget."""
        most_urgent: dict[WaitingClient, int] = {}
        for waiting in classes:
            most_urgent[waiting.client] = min(most_urgent.get(waiting.client, waiting.priority), waiting.priority)

        def distance(waiting: QueueClass) -> tuple[int, int, int]:
            urgency = waiting.priority - most_urgent[waiting.client]
            return waiting.rank, urgency, abs(waiting.length - opening.length)

        taken: list[QueueEntry] = []
        for _, nearest in itertools.groupby(sorted(classes, key=distance), distance):
            self._take_in_turns(budget, nearest, taken)
        return taken

    def _take_in_turns(self, budget: BatchBudget, classes: Iterable[QueueClass], taken: list[QueueEntry]) -> None:
        """Add to ``taken`` rows of these queue classes within the budget: of the clients in turns, by their deadlines.

        They are left in the queue.
        """
        rows_of: dict[WaitingClient, list[tuple[int, int, QueueEntry, Iterator[QueueEntry]]]] = {}
        for index, waiting in enumerate(classes):
            entries = iter(waiting.entries)
            first = next(entries)
            rows_of.setdefault(waiting.client, []).append((first.virtual_deadline, index, first, entries))
        for rows in rows_of.values():
            heapq.heapify(rows)
        turns = [(client.virtual_time, *rows[0][:2], client, rows) for client, rows in rows_of.items()]
        heapq.heapify(turns)
        while turns:
            *_, client, rows = turns[0]
            _, index, entry, entries = rows[0]
            following = None
            if budget.try_add(entry.tokens):
                taken.append(entry)
                client.virtual_time += entry.tokens
                following = next(entries, None)
            elif budget.is_full:
                return
            if following is not None:
                heapq.heapreplace(rows, (following.virtual_deadline, index, following, entries))
            else:
                heapq.heappop(rows)
            if rows:
                heapq.heapreplace(turns, (client.virtual_time, *rows[0][:2], client, rows))
            else:
                heapq.heappop(turns)

    def _note_taken(self, entries: Sequence[QueueEntry]) -> None:
        """Take entries out of the queue, which a batch will have."""
        long_tokens = self._long_tokens
        self.clock += sum([entry.tokens for entry in entries])
        ended = self._remove(entries)
        self._kept_together = max(0, self._kept_together - (long_tokens - self._long_tokens))
        self.small_requests.increment(ended)

    def _has_recent_small_requests(self, max_tokens: int) -> bool:
        if (total := self.small_requests.total) != self._small_requests_seen:
            self._small_requests_seen, self._small_request_at = total, self.clock
        last = self._small_request_at
        return last is not None and self.clock - last <= MAX_BATCHES_SINCE_SMALL * max_tokens

    async def wait_not_empty(self) -> None:
        """Wait until an entry waits. Cancellation: at once; nothing is taken."""
        while not self._entries and not (self.takes_background and self.background.has_batch):
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


def batch_of(entries: Sequence[QueueEntry]) -> Batch:
    """Return the batch of these entries' rows, in their order."""
    return Batch(tuple([entry.request for entry in entries]))

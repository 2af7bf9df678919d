"""The queue of a model's rows: whose turn it is, and which rows are computed together.

When a device has room, ``take`` forms a batch from all rows that wait at that moment. Clients take turns by start-time
fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the client with the fewest tokens taken since it began to wait opens
the next batch. Only ``rank`` comes before that.

Within a client, rows with the lowest priority number come first, then the row with the earliest virtual deadline: the
client's clock at its arrival plus ``FAIRNESS`` times the tokens of its request that wait up to and including the row
(virtual finish time: Demers, Keshav and Shenker, SIGCOMM 1989). So a single text passes its client's 2,048, and no row
starves. If any row has waited for ``max_age_s``, the oldest opens every second batch.

The rows nearest in length to the first one fill the batch, if they have the same key. There are three lanes. Short rows
go anywhere. Long rows may be left to devices that already compute long ones. While small requests arrive, long work
(long rows and the rest of large requests) gets short batches of its own. Planned batches are taken exactly as they
were planned, when the dispatcher asks for one.

Waiting rows are not kept in order: all rows of a queue class wait equally long, so only the first of each is compared.
"""

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_source import BatchSource
from trio_pool_serve.engine.batching import BatchBudget, BatchLimits, length_class
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS, QueueClass, RequestGroup, WaitingClient
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.speed import ComputeRates, work_class
from trio_pool_serve.errors import DeadlineExceededError

MAX_BATCHES_SINCE_SMALL = 4
"""Long work gets full batches again once this many full batches of tokens were taken since the last small request."""

MAX_CLIENTS_OF_BATCH = 64
"""Clients compared for one batch, the next in turn first."""


@define(eq=False)
class Scheduler(BatchSource):
    """The rows of one model that wait in this process. Withdrawn rows leave at once.

    By the ``rates`` of the devices, rows that would be late fail instead of being computed.
    """

    max_age_s: float = math.inf
    rates: ComputeRates = field(factory=ComputeRates)
    clock: int = field(default=0, init=False)
    """Tokens of all rows taken so far."""
    small_requests: int = field(default=0, init=False)
    """Small requests whose rows have all been taken."""
    small_elsewhere: int = field(default=0, init=False)
    """Small requests that the devices have computed for other processes."""
    _entries: OrderedDict[QueueEntry, QueueClass] = field(init=False, factory=OrderedDict)
    """The waiting rows, in order of arrival."""
    _clients: dict[int, WaitingClient] = field(init=False, factory=dict)
    _virtual_time: int = field(default=0, init=False)
    """Where a client begins: the lowest virtual time of the clients that waited after the latest batch."""
    _turns: Iterator[int] = field(init=False, factory=itertools.count)
    _groups: dict[int, RequestGroup] = field(init=False, factory=dict)
    _opened_old: bool = field(default=False, init=False)
    _small_requests_seen: int = field(default=0, init=False)
    _small_request_at: int | None = field(default=None, init=False)
    _long_tokens: int = field(default=0, init=False)
    """Tokens of the waiting long rows."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the waiting entries in order of arrival, then over the entries of planned batches."""
        return itertools.chain(self._entries, *self.planned.values())

    def put_nowait(self, *entries: QueueEntry) -> None:
        """Add entries: rows that may be in any batch, or all rows of one planned batch."""
        if entries and (number := entries[0].request.planned) is not None:
            self.put_planned(number, entries)
            return
        clients, groups, arrived = self._clients, self._groups, self._entries
        short_tokens = long_tokens = 0
        client, group, last = None, RequestGroup(), None
        for entry in entries:
            request = entry.request
            tokens = entry.tokens = len(request.prompt.token_ids)
            if client is None or client.number != request.client:
                client = clients.get(request.client) or clients.setdefault(
                    request.client, WaitingClient(request.client, next(self._turns), self._virtual_time)
                )
                clock, classes = client.virtual_time, client.classes
            if not request.group:  # a group of this row alone
                group = RequestGroup()
            elif group.number != request.group:
                group = groups.get(request.group) or groups.setdefault(request.group, RequestGroup(request.group))
            wait_tokens = group.add(tokens, clock)
            entry.virtual_deadline = clock + wait_tokens
            kind = client, request.rank, request.priority, tokens, wait_tokens, entry.key
            if kind != last:  # most rows of a large request follow one of their kind
                last, key = kind, (request.rank, request.priority, length_class(tokens), wait_tokens, entry.key)
                waiting = classes.get(key) or classes.setdefault(key, QueueClass(client, *key))
            arrived[entry] = waiting
            waiting.entries[entry] = None
            if tokens > SHORT_TOKENS:
                long_tokens += tokens
            else:
                short_tokens += tokens
        self.tokens += short_tokens + long_tokens
        self._long_tokens += long_tokens
        self._long.add_short(short_tokens)
        self.changed.unpark()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out of the queue; does nothing if it is not waiting."""
        if entry in self._entries:
            self._remove([entry])
        else:
            self.withdraw_planned(entry.request.planned)

    def _remove(self, entries: Sequence[QueueEntry]) -> int:
        """Take waiting entries out of the queue; return the number of small requests that have no rows left."""
        groups, arrived = self._groups, self._entries
        long_tokens = tokens = ended = 0
        for entry in entries:
            waiting = arrived.pop(entry)
            del waiting.entries[entry]
            if not waiting.entries:
                client = waiting.client
                del client.classes[waiting.rank, waiting.priority, waiting.length, waiting.wait_tokens, waiting.key]
                if not client.classes:
                    del self._clients[client.number]
            group = groups.get(entry.request.group)
            if group is not None:
                group.rows -= 1
                if not group.rows:
                    del groups[entry.request.group]
            if group is None or not group.rows:
                ended += not waiting.is_long_work
            tokens += entry.tokens
            if entry.tokens > SHORT_TOKENS:
                long_tokens += entry.tokens
        self.tokens -= tokens
        self._long_tokens -= long_tokens
        return ended

    def take(self, limits: BatchLimits, *, leaves_long: bool = False) -> list[QueueEntry]:
        """Take the rows of one batch within the limits, all with the same batch key; fail rows that would be late.

        With ``leaves_long``, long rows are left to other devices while short rows are at least an eighth of all tokens
        and not too many long ones wait. Empty if no row may be taken.
        """
        while entries := self._form(limits, leaves_long=leaves_long):
            if in_time := self._without_late(entries):
                return in_time
        return []

    def take_all(self) -> list[QueueEntry]:  # noqa: D102
        entries = [*self]
        self._remove([*self._entries])
        self.planned.clear()
        return entries

    @property
    def oldest_s(self) -> float:  # noqa: D102
        oldest = next(iter(self._entries), None)
        return 0.0 if oldest is None else time.perf_counter() - oldest.queued_at

    def _form(self, limits: BatchLimits, *, leaves_long: bool) -> list[QueueEntry]:
        leaves_long = leaves_long and self._long.waits(self._long_tokens)
        classes = self._classes_in_turn(leaves_long=leaves_long)
        opening = self._opening(classes, leaves_long=leaves_long)
        if opening is None:
            return []
        budget = limits.budget()
        if limits.short_batch_tokens is not None and self._has_recent_small_requests(limits.max_tokens):
            classes = [waiting for waiting in classes if waiting.is_long_work == opening.is_long_work]
            if opening.is_long_work:
                budget.max_tokens = min(limits.max_tokens, limits.short_batch_tokens)
        taken = [opening.first]
        budget.try_add(taken[0].tokens)
        self._note_taken(taken)
        opening.client.virtual_time += taken[0].tokens
        filling = self._fill(budget, opening, [each for each in classes if each.entries and each.key == opening.key])
        self._note_taken(filling)
        taken += filling
        least = min([client.virtual_time for client in self._clients.values()], default=opening.client.virtual_time)
        self._virtual_time = max(self._virtual_time, least)
        return taken

    def _without_late(self, entries: list[QueueEntry]) -> list[QueueEntry]:
        """Return the entries that can be answered before their deadline, and fail the others.

        The duration of the batch counts only while others wait: only batches correct a wrong estimate.
        """
        if min([entry.request.deadline for entry in entries]) == math.inf:
            return entries
        seconds = 0.0
        if self._entries:
            first = entries[0].request.prompt
            row_class = work_class(len(first.token_ids), has_images=first.images is not None)
            seconds = self.rates.seconds_of(row_class, sum([entry.tokens for entry in entries]))
        done_at = trio.current_time() + seconds
        late = [entry for entry in entries if entry.request.deadline < done_at]
        for entry in late:
            entry.fail(DeadlineExceededError("The deadline would pass before this input is computed."))
        return [entry for entry in entries if entry.error is None] if late else entries

    def _classes_in_turn(self, *, leaves_long: bool) -> list[QueueClass]:
        """Return the queue classes of the clients next in turn; with ``leaves_long`` only those of short rows."""
        clients: Iterable[WaitingClient] = self._clients.values()
        if len(self._clients) > MAX_CLIENTS_OF_BATCH:
            clients = heapq.nsmallest(
                MAX_CLIENTS_OF_BATCH, clients, key=lambda client: (client.rank, client.virtual_time)
            )
        classes = [waiting for client in clients for waiting in client.classes.values()]
        return [waiting for waiting in classes if waiting.first.tokens <= SHORT_TOKENS] if leaves_long else classes

    def _opening(self, classes: list[QueueClass], *, leaves_long: bool) -> QueueClass | None:
        """Return the queue class whose first row opens the next batch."""
        if not self._opened_old and self.oldest_s > self.max_age_s:
            oldest, waiting = next(iter(self._entries.items()))
            if not (leaves_long and oldest.tokens > SHORT_TOKENS):
                self._opened_old = True
                return waiting
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
            return waiting.rank, waiting.priority - most_urgent[waiting.client], abs(waiting.length - opening.length)

        taken: list[QueueEntry] = []
        for _, nearest in itertools.groupby(sorted(classes, key=distance), distance):
            self._take_in_turns(budget, nearest, taken)
        return taken

    def _take_in_turns(self, budget: BatchBudget, classes: Iterable[QueueClass], taken: list[QueueEntry]) -> None:
        """Add rows of these queue classes to ``taken`` within the budget: clients in turns, by virtual deadline.

        The rows stay in the queue.
        """
        classes = [*classes]
        if len(classes) == 1:  # as below, without turns
            fitting = [*itertools.takewhile(lambda entry: budget.try_add(entry.tokens), classes[0].entries)]
            classes[0].client.virtual_time += sum([entry.tokens for entry in fitting])
            taken += fitting
            return
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
            *_, client, rows = heapq.heappop(turns)
            while rows:
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
                if turns and rows:  # of one client alone, all rows are in one turn
                    *_, client, rows = heapq.heappushpop(turns, (client.virtual_time, *rows[0][:2], client, rows))

    def _note_taken(self, entries: Sequence[QueueEntry]) -> None:
        """Take entries that a batch will contain out of the queue."""
        tokens, long_tokens = self.tokens, self._long_tokens
        self.small_requests += self._remove(entries)
        self.clock += tokens - self.tokens
        if long_tokens > self._long_tokens:
            self._long.take_long(long_tokens - self._long_tokens)

    def _has_recent_small_requests(self, max_tokens: int) -> bool:
        if (total := self.small_requests + self.small_elsewhere) != self._small_requests_seen:
            self._small_requests_seen, self._small_request_at = total, self.clock
        last = self._small_request_at
        return last is not None and self.clock - last <= MAX_BATCHES_SINCE_SMALL * max_tokens

    def __repr__(self) -> str:
        return f"<Scheduler {len(self)} rows, {self.tokens} tokens>"

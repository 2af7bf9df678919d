"""Joins rows of the batches that API processes have sent to a device server.

Each API process has at most a few batches here, one for each of its credits. A pass has at least one row of each batch,
so a lone row beside another process's thousands is in the next pass. Then batches with the lowest rank get more, and
API processes in proportion to the clients that wait there. Only rows with equal keys are joined, within the token
budget and the padding that ``BatchBudget`` allows. Nothing waits for more rows to arrive.

A planned batch is computed when the dispatcher asks for one, and a suspect batch alone; neither is joined or split.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heapreplace
from itertools import chain, takewhile

from attrs import Factory, define, field

from trio_pool_serve.engine.batch_source import BatchSource
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.wire import BatchFacts


@define(eq=False)
class SentBatch:
    """A batch of one API process; its rows are taken in order, by one pass or several."""

    facts: BatchFacts
    settled: Callable[["SentBatch", Sequence[QueueEntry]], None]
    """Called with entries that are finished, have failed or are withdrawn."""
    rows: dict[QueueEntry, None] = field(init=False, factory=dict)
    """The waiting rows."""
    arriving: int = field(init=False, default=Factory(lambda self: self.facts.rows, takes_self=True))
    """Number of rows that have not arrived yet."""
    left: int = field(init=False, default=Factory(lambda self: self.facts.rows, takes_self=True))
    """Number of rows that are neither settled nor withdrawn, including rows that have not arrived."""
    device_s: float = field(init=False, default=0.0)

    def settle(self, entries: Sequence[QueueEntry]) -> None:
        """Count entries as settled or withdrawn, and pass them on."""
        self.left -= len(entries)
        self.settled(self, entries)

    @property
    def first(self) -> QueueEntry:
        """The row that is taken next."""
        return next(iter(self.rows))

    @property
    def is_long(self) -> bool:
        """Whether the next row is long."""
        return self.first.tokens > SHORT_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of the waiting rows."""
        return sum([entry.tokens for entry in self.rows])


@define(eq=False)
class Joiner(BatchSource):
    """The batches of all API processes that wait at one device server.

    ``oldest_s`` is not measured: rows wait for a device of their zone in their API process, not here.
    """

    _batches: dict[SentBatch, None] = field(init=False, factory=dict)
    """In order of arrival, or of the latest pass that left some of its rows: so keys take turns."""

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def take_all(self) -> list[QueueEntry]:  # noqa: D102
        entries = [*chain(*(batch.rows for batch in self._batches), *self.planned.values())]
        self._batches, self.planned, self.tokens = {}, {}, 0
        return entries

    def put_nowait(self, batch: SentBatch) -> None:
        """Add a batch whose rows have all arrived, at least one."""
        if batch.facts.is_planned:
            self.put_planned(batch, batch.rows)
            return
        self._batches[batch] = None
        self.tokens += batch.tokens
        if not batch.is_long:
            self._long.add_short(batch.tokens)
        self.changed.unpark()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out, if it waits; rows of a planned batch leave together, once all are withdrawn."""
        entry.is_abandoned, batch = True, entry.holder
        if withdrawn := self.withdraw_planned(batch):
            batch.settle(withdrawn)
        elif batch in self._batches and entry in batch.rows:
            del batch.rows[entry]
            self.tokens -= entry.tokens
            if not batch.rows:
                del self._batches[batch]
            batch.settle([entry])

    def take(self, limits: BatchLimits, *, leaves_long: bool = False) -> list[QueueEntry]:  # noqa: D102
        batches = sorted(self._batches, key=lambda each: each.facts.rank)
        if leaves_long and self._long.waits(sum([each.tokens for each in batches if each.is_long])):
            batches = [each for each in batches if not each.is_long]
        if not batches:
            return []
        first, *others = batches
        beside = [each for each in others if each.facts.key == first.facts.key and not each.facts.is_suspect]
        batches = [first] if first.facts.is_suspect else [first, *beside]
        taken = _joined(batches, limits)
        # Batches that have had their turn go behind the others; the order among them is kept.
        self._batches = {batch: None for batch in sorted(self._batches, key=batches.__contains__) if batch.rows}
        self.tokens -= sum([entry.tokens for entry in taken])
        self._long.take_long(sum([entry.tokens for entry in taken if entry.tokens > SHORT_TOKENS]))
        return taken

    def __repr__(self) -> str:
        return f"<Joiner {len(self)} rows of {len(self._batches)} batches>"


def _joined(batches: Sequence[SentBatch], limits: BatchLimits) -> list[QueueEntry]:
    """Take rows of batches sorted by rank: one of each, then by rank and by tokens taken per client."""
    budget, taken = limits.budget(), list[QueueEntry]()
    rows = [iter(batch.rows) for batch in batches]
    # Whether a batch has had its first turn, its rank, tokens taken per client, its place. Sorted, so it is a heap.
    turns = [(False, batch.facts.rank, 0.0, place, next(rows[place])) for place, batch in enumerate(batches)]
    while len(turns) > 1:
        _, rank, tokens, place, entry = turns[0]
        if not budget.try_add(entry.tokens):
            heappop(turns)
            continue
        taken.append(entry)
        if (following := next(rows[place], None)) is not None:
            tokens += entry.tokens / batches[place].facts.queue.clients
            heapreplace(turns, (True, rank, tokens, place, following))
        else:
            heappop(turns)
    *_, place, entry = turns[0]
    waiting = [entry, *rows[place]]
    if not budget.try_add_all(sum([entry.tokens for entry in waiting]), len(waiting)):
        waiting = [*takewhile(lambda entry: budget.try_add(entry.tokens), waiting)]
    taken += waiting
    for entry in taken:
        del entry.holder.rows[entry]
    return taken

"""The batches that API processes have sent to a device server, and which of their rows are computed together.

Each API process has at most a few batches here: what it has credits for. The rows of several are joined, at least one
of each: so a row alone beside another process's thousands is in the next pass. Then those with the smallest rank get
more, and API processes in proportion to the clients that wait there. Only rows with equal keys are joined, within the
token budget and the padding that ``BatchBudget`` allows. Nothing waits for more to arrive.

A planned batch is computed when nothing else waits, and a suspect one alone; neither is joined or divided.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.change import Change
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import MAX_KEPT_TOGETHER, MAX_TOKENS_BEFORE_LONG
from trio_pool_serve.engine.waiting_rows import BULK_TOKENS, FAIRNESS
from trio_pool_serve.types import PlannedBatch


@define(eq=False)
class SentBatch:
    """A batch of one API process, whose rows are taken in order, by one pass or several.

    ``settled`` is called with entries that are finished or have failed, ``done`` once all of them are.
    """

    number: int
    rank: int
    clients: int
    key: str
    planned: PlannedBatch | None
    """``None`` for ordinary batches."""
    is_suspect: bool
    settled: Callable[[Sequence[QueueEntry]], None]
    done: Callable[["SentBatch"], None]
    rows: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)
    """Those that wait."""
    left: int = field(init=False, default=0)
    """Rows that are not settled."""
    device_s: float = field(init=False, default=0.0)

    def settle(self, entries: Sequence[QueueEntry]) -> None:
        """Pass on entries that are settled."""
        self.settled(entries)
        self.note_left(len(entries))

    def note_left(self, rows: int) -> None:
        """Count rows that are settled or withdrawn."""
        self.left -= rows
        if not self.left:
            self.done(self)

    @property
    def first(self) -> QueueEntry:
        """The row that is taken next."""
        return next(iter(self.rows))

    @property
    def tokens(self) -> int:
        """Tokens of the rows that wait."""
        return sum(entry.tokens for entry in self.rows)


@define(eq=False)
class Joiner:
    """The batches of all API processes that wait at one device server."""

    tokens: int = field(init=False, default=0)
    """Tokens of all waiting rows, without those of planned batches."""
    _batches: dict[SentBatch, None] = field(init=False, factory=dict)
    """In order of arrival: an API process sends its next one when it has the answers to an earlier one."""
    _planned: dict[SentBatch, None] = field(init=False, factory=dict)
    _kept_together: int = field(init=False, default=0)
    """Tokens of long rows that are still left to the threads that compute such, as short ones have come."""
    changed: Change = field(init=False, factory=Change)
    """Noted when rows arrive."""

    def __len__(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def take_all(self) -> list[QueueEntry]:
        """Take all rows, those of planned batches included."""
        batches, self._batches, self._planned, self.tokens = [*self._batches, *self._planned], {}, {}, 0
        return [entry for batch in batches for entry in batch.rows]

    def put_nowait(self, batch: SentBatch) -> None:
        """Add a batch whose rows have all arrived."""
        if batch.planned is not None:
            self._planned[batch] = None
        elif batch.rows:
            self._batches[batch] = None
            self.tokens += batch.tokens
            if batch.first.tokens <= BULK_TOKENS:
                self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * batch.tokens)
        self.changed.note()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out, if it waits; of a planned batch only all rows together."""
        entry.is_abandoned, batch = True, entry.holder
        if batch.planned is not None:
            # The last ones first: rows are withdrawn in the order of their arrival.
            if batch in self._planned and all(row.is_abandoned for row in reversed(batch.rows)):
                del self._planned[batch]
                self._drop(batch, len(batch.rows))
        elif batch in self._batches and entry in batch.rows:
            del batch.rows[entry]
            self.tokens -= entry.tokens
            self._leave_if_empty(batch)
            batch.note_left(1)

    def _drop(self, batch: SentBatch, rows: int) -> None:
        batch.rows.clear()
        batch.note_left(rows)

    def take(self, limits: BatchLimits) -> list[QueueEntry]:
        """Take the rows of one pass; empty if none may be taken."""
        batches = sorted(self._batches, key=lambda each: each.rank)
        if limits.leaves_long:
            short = [each for each in batches if each.first.tokens <= BULK_TOKENS]
            long_tokens = sum([each.tokens for each in batches if each not in short])
            if long_tokens <= min(self._kept_together, MAX_TOKENS_BEFORE_LONG):  # as in a scheduler
                batches = short
        if not batches:
            return []
        first = batches[0]
        beside = (
            [] if first.is_suspect else [each for each in batches[1:] if each.key == first.key and not each.is_suspect]
        )
        taken = self._joined([first, *beside], limits) if beside else self._alone(first, limits)
        self.tokens -= sum([entry.tokens for entry in taken])
        long_tokens = sum([entry.tokens for entry in taken if entry.tokens > BULK_TOKENS])
        self._kept_together = max(0, self._kept_together - long_tokens)
        return taken

    def _alone(self, batch: SentBatch, limits: BatchLimits) -> list[QueueEntry]:
        budget, taken = limits.budget(), list[QueueEntry]()
        while batch.rows and budget.try_add(batch.first.tokens):
            taken.append(batch.rows.popitem(last=False)[0])
        self._leave_if_empty(batch)
        return taken

    def _joined(self, batches: list[SentBatch], limits: BatchLimits) -> list[QueueEntry]:
        budget, taken = limits.budget(), list[QueueEntry]()
        shares = dict.fromkeys(batches, 0.0)
        """Tokens that were taken of each, divided by its clients."""

        def take_of(batch: SentBatch) -> bool:
            entry = batch.first
            if not budget.try_add(entry.tokens):
                return False
            del batch.rows[entry]
            taken.append(entry)
            shares[batch] += entry.tokens / batch.clients
            return True

        fitting = [batch for batch in batches if take_of(batch)]
        while (left := [batch for batch in fitting if batch.rows]) and not budget.is_full:
            batch = min(left, key=lambda each: (each.rank, shares[each]))
            if not take_of(batch):
                fitting.remove(batch)
        for batch in batches:
            self._leave_if_empty(batch)
        return taken

    def _leave_if_empty(self, batch: SentBatch) -> None:
        if not batch.rows:
            self._batches.pop(batch, None)

    def take_planned(self) -> list[QueueEntry]:
        """Take the rows of the planned batch that came first; empty if there is none."""
        if not self._planned:
            return []
        batch = next(iter(self._planned))
        del self._planned[batch]
        rows = [*batch.rows]
        batch.rows.clear()
        return rows

    @property
    def oldest_s(self) -> float:
        """Seconds for which the batch that came first has waited; 0 if none waits."""
        oldest = next(iter(self._batches), None)
        return 0.0 if oldest is None else time.perf_counter() - oldest.first.queued_at

    def __repr__(self) -> str:
        return f"<Joiner {len(self)} rows of {len(self._batches)} batches>"

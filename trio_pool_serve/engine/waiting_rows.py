"""What the scheduler's rows wait in: clients, queue classes, request groups and planned batches."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field

from trio_pool_serve.engine.queue_entry import QueueEntry

FAIRNESS = 8
"""Most tokens taken in all per token of one group: a group that always has rows waiting gets at least an eighth."""

BULK_TOKENS = 256
"""A row is bulk if more than this many tokens of its group wait up to and including it."""

ClassKey: TypeAlias = tuple[int, int, int, int, str]
"""Rank, priority, length class, wait and batch key."""


@define(eq=False)
class WaitingClient:
    """A client that has rows waiting: the ``turn``-th that began to wait.

    ``virtual_time``, its clock, is where it began, plus the tokens taken of it since.
    """

    number: int
    turn: int
    virtual_time: int
    classes: "dict[ClassKey, QueueClass]" = field(init=False, factory=dict)

    def open_class(self, key: ClassKey) -> "QueueClass":
        """Return a new queue class for its rows."""
        opened = self.classes[key] = QueueClass(self, *key)
        return opened

    @property
    def rank(self) -> int:
        """The rank of its most urgent rows."""
        return min(rank for rank, *_ in self.classes)


@define(eq=False)
class QueueClass:
    """Entries of one client, rank, priority and batch key, about one length and one wait, in order of arrival.

    The wait is counted in tokens, from arrival to virtual deadline, and rounded up to a power of two.
    """

    client: WaitingClient
    rank: int
    priority: int
    length: int
    wait_tokens: int
    key: str
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
class PlannedBatches:
    """Planned batches in order of arrival; one can be taken when all of its rows have arrived.

    It is computed with all of them, those included that are withdrawn meanwhile: what is computed from a row depends on
    the rows beside it in the last bits. A batch of withdrawn rows alone leaves at once.
    """

    _batches: dict[int, list[QueueEntry]] = field(init=False, factory=dict)
    """The entries that have arrived, by the number of their batch."""

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the waiting entries."""
        return (entry for entries in self._batches.values() for entry in entries)

    def put_nowait(self, entry: QueueEntry, number: int) -> None:
        """Add an entry of a batch."""
        self._batches.setdefault(number, []).append(entry)

    def withdraw(self, number: int) -> None:
        """Drop a batch if all of its entries that have arrived are abandoned."""
        entries = self._batches.get(number, [])
        # The last ones first: rows are withdrawn in the order of their arrival.
        if entries and all(entry.is_abandoned for entry in reversed(entries)):
            del self._batches[number]

    def take(self) -> list[QueueEntry]:
        """Take the entries of the first batch that is complete; none if there is none."""
        for number, entries in self._batches.items():
            planned = entries[0].request.planned
            if planned is not None and len(entries) >= planned.rows:
                return self._batches.pop(number)
        return []

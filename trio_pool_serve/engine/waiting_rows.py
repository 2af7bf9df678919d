"""Where rows wait in the scheduler: clients, queue classes, request groups and planned batches."""

from collections import OrderedDict
from collections.abc import Iterator

from attrs import Factory, define, field

from trio_pool_serve.engine.batching import length_class
from trio_pool_serve.engine.queue_entry import QueueEntry

FAIRNESS = 8
"""Maximum tokens taken in all per token of one group: a group that always has rows waiting gets at least an eighth."""

SHORT_TOKENS = 256
"""Maximum tokens of a short row. A row is long work if more tokens of its group wait up to and including it."""


@define(eq=False)
class WaitingClient:
    """A client that has rows waiting, the ``turn``-th that began to wait.

    ``virtual_time`` is its clock: where it began plus the tokens taken of it since.
    """

    number: int
    turn: int
    virtual_time: int
    classes: "dict[tuple[int, int, int, int, str], QueueClass]" = field(init=False, factory=dict)
    """By rank, priority, length class, wait and batch key."""

    @property
    def rank(self) -> int:
        """The rank of its most urgent rows."""
        return min(rank for rank, *_ in self.classes)

    def class_of(self, entry: QueueEntry, wait_tokens: int) -> "QueueClass":
        """Return the queue class of an entry, a new one if none of its entries waits."""
        key = entry.request.rank, entry.request.priority, length_class(entry.tokens), wait_tokens, entry.key
        return self.classes.get(key) or self.classes.setdefault(key, QueueClass(self, *key))


@define(eq=False)
class QueueClass:
    """Entries of one client, rank, priority, batch key, length class and wait, in order of arrival.

    The wait, from arrival to virtual deadline, is counted in tokens and rounded up to a power of two.
    """

    client: WaitingClient
    rank: int
    priority: int
    length: int
    wait_tokens: int
    key: str
    entries: OrderedDict[QueueEntry, None] = field(init=False, factory=OrderedDict)
    is_long_work: bool = field(
        init=False, default=Factory(lambda self: self.wait_tokens > FAIRNESS * SHORT_TOKENS, takes_self=True)
    )
    """Whether its entries are long rows, or follow many tokens of their group."""

    @property
    def first(self) -> QueueEntry:
        """The entry with the earliest virtual deadline."""
        return next(iter(self.entries))


@define(eq=False)
class RequestGroup:
    """The waiting rows of one request: their number, and the virtual deadline of the last one before rounding."""

    rows: int = 0
    virtual_deadline: int = 0

    def add(self, tokens: int, clock: int) -> int:
        """Count a row that arrives at its client's ``clock``; return its wait in tokens, rounded up."""
        self.rows += 1
        self.virtual_deadline = max(self.virtual_deadline, clock) + FAIRNESS * tokens
        return 1 << (self.virtual_deadline - clock - 1).bit_length()


@define(eq=False)
class PlannedBatches:
    """Planned batches in order of arrival; a batch can be taken when all of its rows have arrived.

    It is computed with all of them, including rows withdrawn meanwhile: in its last bits, a row's output depends on the
    rows beside it. If all rows are withdrawn, the batch leaves at once.
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
        # Last rows first: rows are withdrawn in order of arrival.
        if entries and all(entry.is_abandoned for entry in reversed(entries)):
            del self._batches[number]

    def take(self) -> list[QueueEntry]:
        """Take the entries of the first complete batch; empty if there is none."""
        for number, entries in self._batches.items():
            planned = entries[0].request.planned
            if planned is not None and len(entries) >= planned.rows:
                return self._batches.pop(number)
        return []

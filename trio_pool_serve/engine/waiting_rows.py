"""Where rows wait: the base of queues with planned batches; the scheduler's clients, queue classes and groups."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from attrs import Factory, define, field
from trio.lowlevel import ParkingLot

from trio_pool_serve.engine.batching import BatchLimits, length_class
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
class BatchSource(ABC):
    """A queue that batches are taken from: a ``Scheduler``, or the ``Joiner`` of a device server.

    A planned batch arrives whole and is computed with all of its rows, including rows withdrawn meanwhile: in its last
    bits, a row's output depends on the rows beside it. If all rows are withdrawn, the batch leaves at once.
    """

    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows, without planned batches."""
    planned: dict[object, list[QueueEntry]] = field(init=False, factory=dict)
    """Planned batches in order of arrival: background work, which does not count as waiting rows."""
    changed: ParkingLot = field(init=False, factory=ParkingLot)
    """Unparked when rows arrive."""
    planned_changed: ParkingLot = field(init=False, factory=ParkingLot)
    """Unparked when planned batches arrive."""
    _kept_together: int = field(default=0, init=False)
    """Tokens of long rows still left to the devices that compute long rows, on account of short ones."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting rows, without planned batches."""

    @abstractmethod
    def take(self, limits: BatchLimits, *, leaves_long: bool = False) -> list[QueueEntry]:
        """Take the rows of one batch; empty if no row may be taken, as when long rows are left to other devices."""

    @abstractmethod
    def take_all(self) -> list[QueueEntry]:
        """Take all rows, planned batches included."""

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest row has waited; 0 if none waits, or if it is not measured."""
        return 0.0

    def put_planned(self, key: object, entries: Iterable[QueueEntry]) -> None:
        """Add a planned batch."""
        self.planned[key] = [*entries]
        self.planned_changed.unpark_all()
        self.changed.unpark_all()

    def take_planned(self) -> list[QueueEntry]:
        """Take the rows of the oldest planned batch; empty if there is none."""
        return self.planned.pop(next(iter(self.planned))) if self.planned else []

    def withdraw_planned(self, key: object) -> list[QueueEntry]:
        """Take the rows of a planned batch if all of them are abandoned; otherwise empty."""
        # Last rows first: rows are withdrawn in order of arrival.
        is_wanted = not all(entry.is_abandoned for entry in reversed(self.planned.get(key, [])))
        return [] if is_wanted else self.planned.pop(key, [])

"""Where the scheduler's rows wait: clients, queue classes, and request groups with their virtual deadlines."""

from collections import OrderedDict

from attrs import Factory, define, field

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
    """The waiting rows of one request: how many, and the virtual deadline of the last one before rounding."""

    number: int = 0
    rows: int = 0
    virtual_deadline: int = 0

    def add(self, tokens: int, clock: int) -> int:
        """Count a row that arrives at its client's ``clock``; return its wait in tokens, rounded up."""
        self.rows += 1
        self.virtual_deadline = deadline = max(self.virtual_deadline, clock) + FAIRNESS * tokens
        return 1 << (deadline - clock - 1).bit_length()

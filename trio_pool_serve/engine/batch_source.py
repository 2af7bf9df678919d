"""The base of the two queues that batches are taken from, with their planned batches and the lane for long rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from attrs import define, field
from trio.lowlevel import ParkingLot

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_classes import FAIRNESS
from trio_pool_serve.engine.queue_entry import QueueEntry

MAX_TOKENS_BEFORE_LONG = 2048
"""Maximum tokens of long rows that wait while a device is kept free for short ones."""

MAX_KEPT_TOGETHER = 8192
"""Maximum tokens of long rows that are kept together on account of earlier short rows."""


@define
class LongLane:
    """Whether long rows wait for the devices that compute long ones already: while short rows are an eighth of all."""

    _kept_together: int = field(default=0, init=False)
    """Tokens of long rows still left to the devices that compute long rows, on account of short ones."""

    def add_short(self, tokens: int) -> None:
        """Count tokens of short rows that have arrived."""
        self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * tokens)

    def take_long(self, tokens: int) -> None:
        """Count tokens of long rows that were taken."""
        self._kept_together = max(0, self._kept_together - tokens)

    def waits(self, long_tokens: int) -> bool:
        """Return whether the waiting long rows, ``long_tokens`` tokens, are left to other devices."""
        return long_tokens <= min(self._kept_together, MAX_TOKENS_BEFORE_LONG)


@define(eq=False)
class BatchSource(ABC):
    """A queue that batches are taken from: a ``Scheduler``, or the ``Joiner`` of a device server.

    A planned batch arrives whole and is computed with all of its rows, including rows withdrawn meanwhile: in its last
    bits, a row's output depends on the rows beside it. If all rows are withdrawn, the batch leaves at once.
    """

    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows, without planned batches; 0 only if none wait."""
    planned: dict[object, list[QueueEntry]] = field(init=False, factory=dict)
    """Planned batches in order of arrival: background work, which does not count as waiting rows."""
    changed: ParkingLot = field(init=False, factory=ParkingLot)
    """One task is unparked when rows arrive."""
    planned_changed: ParkingLot = field(init=False, factory=ParkingLot)
    """One task is unparked when planned batches arrive."""
    _long: LongLane = field(init=False, factory=LongLane)

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
        assert key not in self.planned  # noqa: S101  (its rows would never be settled)
        self.planned[key] = [*entries]
        self.planned_changed.unpark()
        self.changed.unpark()

    def take_planned(self) -> list[QueueEntry]:
        """Take the rows of the oldest planned batch; empty if there is none."""
        return self.planned.pop(next(iter(self.planned))) if self.planned else []

    def withdraw_planned(self, key: object) -> list[QueueEntry]:
        """Take the rows of a planned batch if all of them are abandoned; otherwise empty."""
        # Last rows first: rows are withdrawn in order of arrival.
        is_wanted = not all(entry.is_abandoned for entry in reversed(self.planned.get(key, [])))
        return [] if is_wanted else self.planned.pop(key, [])

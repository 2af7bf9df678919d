"""The base of the two queues that batches are taken from, with their planned batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from attrs import define, field
from trio.lowlevel import ParkingLot

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_entry import QueueEntry


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
        assert key not in self.planned  # noqa: S101  (its rows would never be settled)
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

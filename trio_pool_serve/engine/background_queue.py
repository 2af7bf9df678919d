"""Batches of background work, whose rows their submitter has chosen: taken when no other rows wait."""

from collections import OrderedDict
from collections.abc import Iterator

from attrs import define, field

from trio_pool_serve.engine.queue_entry import QueueEntry


@define(eq=False)
class BackgroundQueue:
    """Planned batches in order of arrival; one can be taken when all of its rows have arrived.

    It is computed with all of them, those included that are withdrawn meanwhile: what is computed from a row depends on
    the rows beside it in the last bits. A batch of withdrawn rows alone leaves at once.
    """

    rows: int = field(default=0, init=False)
    _batches: OrderedDict[int, list[QueueEntry]] = field(init=False, factory=OrderedDict)
    """The entries that have arrived, by the number of their batch."""

    def __iter__(self) -> Iterator[QueueEntry]:
        """Iterate over the waiting entries."""
        return (entry for entries in self._batches.values() for entry in entries)

    def put_nowait(self, entry: QueueEntry, number: int) -> None:
        """Add an entry of a batch."""
        self._batches.setdefault(number, []).append(entry)
        self.rows += 1

    def withdraw(self, number: int) -> None:
        """Drop a batch if all of its entries that have arrived are abandoned."""
        entries = self._batches.get(number, ())
        if entries and all(entry.is_abandoned for entry in entries):
            self.rows -= len(entries)
            del self._batches[number]

    def take_batch(self) -> list[QueueEntry]:
        """Take the entries of the first batch that is complete; none if there is none."""
        for number, entries in self._batches.items():
            planned = entries[0].request.planned
            if planned is not None and len(entries) >= planned.rows:
                del self._batches[number]
                self.rows -= len(entries)
                return entries
        return []

    @property
    def has_batch(self) -> bool:
        """Whether a batch is complete."""
        return any(
            planned is not None and len(entries) >= planned.rows
            for entries in self._batches.values()
            for planned in [entries[0].request.planned]
        )

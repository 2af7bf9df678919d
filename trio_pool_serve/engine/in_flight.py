"""Batches that a device has, and the delivery of their outputs."""

import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_recovery import Fault
from trio_pool_serve.engine.compute_rates import work_class
from trio_pool_serve.engine.queue_entry import QueueEntry, Settled
from trio_pool_serve.engine.waiting_rows import SHORT_TOKENS
from trio_pool_serve.types import Batch, PooledBatch, PooledValue, PoolingOutput

MAX_DELIVERED_ROWS = 512
"""Rows of one submitter that are delivered to it at once."""

SUBMITTERS_BETWEEN_CHECKPOINTS = 4
"""Each may wake a request, which is answered in half a millisecond or more: so other requests, such as ``/health``, do
not wait for all of a batch."""

RowValues: TypeAlias = list[tuple[PooledValue, ...]]

Outcome: TypeAlias = tuple[QueueEntry, PoolingOutput]


@define(eq=False)
class InFlightBatch:
    """A batch that is launched, with the times of its last pass."""

    entries: Sequence[QueueEntry]
    is_suspect: bool = False
    """Whether its only row was lost with another device, and may be why."""
    launched: float = field(factory=time.perf_counter)
    forward_s: float = field(default=0.0, init=False)
    """Seconds that the launch took."""
    copy_s: float = field(default=0.0, init=False)
    """Seconds between the launch and the outputs."""
    device_s: float = field(default=0.0, init=False)
    """Seconds for which it occupied the device; 0 if that says nothing, as when rows were computed again."""
    handle: PooledBatch | Fault | None = field(default=None, init=False)
    """What a launch in this process has given; ``None`` if no client waited for any of its rows any more."""
    batch: Batch = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.batch = Batch(tuple([entry.request for entry in self.entries]))

    @property
    def waited_for(self) -> list[QueueEntry]:
        """The entries that are not settled, and that clients wait for."""
        return [entry for entry in self.entries if not (entry.is_settled or entry.is_abandoned)]

    @property
    def is_planned(self) -> bool:
        """Whether it is background work, which may not come back for as long as others keep the cores busy."""
        return self.batch.is_planned

    @property
    def is_long(self) -> bool:
        """Whether its rows take so long that short ones should not wait behind it."""
        return not self.is_planned and self.batch.longest > SHORT_TOKENS

    @property
    def work_class(self) -> int:
        """The class of its rows, by their mean length."""
        images = self.batch.requests[0].prompt.images
        return work_class(self.batch.tokens // len(self.entries), has_images=images is not None)

    async def deliver(self, rows: RowValues) -> None:
        """Finish the entries with their outputs, those of one submitter together.

        Cancellation: between two slices; the entries that are left are not settled.
        """
        launched, forward_s, copy_s = self.launched, self.forward_s, self.copy_s
        outcomes = [
            (entry, PoolingOutput(values, launched - entry.queued_at, forward_s, copy_s))
            for entry, values in zip(self.entries, rows, strict=True)
        ]
        await deliver(outcomes, slowly=self.is_planned)


async def deliver(outcomes: Iterable[Outcome], *, slowly: bool = False) -> None:
    """Finish entries with their outputs, those of one submitter together.

    Cancellation: between two slices; the entries that are left are not settled.
    """
    of_submitter: dict[Settled, list[Outcome]] = {}
    for outcome in outcomes:
        of_submitter.setdefault(outcome[0].settled, []).append(outcome)
    slices = [
        rows[begin : begin + MAX_DELIVERED_ROWS]
        for rows in of_submitter.values()
        for begin in range(0, len(rows), MAX_DELIVERED_ROWS)
    ]
    for index, rows in enumerate(slices, start=1):
        for entry, output in rows:
            entry.output = output
        rows[0][0].settled([entry for entry, _ in rows])
        if slowly or index % SUBMITTERS_BETWEEN_CHECKPOINTS == 0:
            await trio.lowlevel.checkpoint()

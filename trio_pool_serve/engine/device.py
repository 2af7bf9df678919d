"""The interface of devices, which compute batches in this process or in another, and the batches in flight there."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_recovery import Fault
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS
from trio_pool_serve.engine.queue_entry import QueueEntry, Settled
from trio_pool_serve.engine.speed import PassCost, work_class
from trio_pool_serve.types import Batch, PooledBatch, PooledValue, PoolingOutput, RunnerFacts

MAX_DELIVERED_ROWS = 512
"""Maximum rows delivered to one submitter at once."""

SUBMITTERS_BETWEEN_CHECKPOINTS = 4
"""Submitters that are woken before other tasks have their turn. Each may wake a request, which takes half a millisecond
or more to answer: other requests, such as ``/health``, must not wait for all of a batch."""

RowValues: TypeAlias = list[tuple[PooledValue, ...]]

Outcome: TypeAlias = tuple[QueueEntry, PoolingOutput]


ThreadKind: TypeAlias = Literal["launch", "ahead", "background"]
"""ahead: while the others compute, launches the next batch, so that no core waits for the event loop.
background: launches planned batches, which are computed at idle priority."""


@define(eq=False)
class InFlightBatch:
    """A batch that is launched, with the times of its last pass."""

    entries: Sequence[QueueEntry]
    is_suspect: bool = False
    """Whether its only row was in flight on a device that was lost, and may be the reason for the loss."""
    kind: ThreadKind = "launch"
    """The kind of thread that launches it, if it is computed in this process."""
    waits: bool = field(default=False, init=False)
    """Whether the batch waits in the runner until another one is computed: ``launched`` is then set again."""
    launched: float = field(init=False)
    forward_s: float = field(default=0.0, init=False)
    """Seconds that the launch took."""
    copy_s: float = field(default=0.0, init=False)
    """Seconds between the launch and the outputs."""
    device_s: float = field(default=0.0, init=False)
    """Seconds that it occupied the device; 0 if that is not meaningful, as when rows were computed again."""
    handle: PooledBatch | Fault | None = field(default=None, init=False)
    """The result of a launch in this process; ``None`` if no client waited for any of its rows any more."""
    batch: Batch = field(init=False)
    is_planned: bool = field(init=False)
    """Whether it is background work, which may not return while other work keeps the cores busy."""

    def __attrs_post_init__(self) -> None:
        # Here rather than as a field's factory, which would be bound on import and miss the clock of the tests.
        self.launched = time.perf_counter()
        self.batch = Batch(tuple([entry.request for entry in self.entries]))
        # A copy: at each turn, the dispatcher and the devices read it for every batch in flight.
        self.is_planned = self.batch.is_planned

    @property
    def waited_for(self) -> list[QueueEntry]:
        """The entries that are not settled and that clients still wait for."""
        return [entry for entry in self.entries if not (entry.is_settled or entry.is_abandoned)]

    @property
    def is_long(self) -> bool:
        """Whether it takes so long that short rows should not wait for it."""
        return not self.is_planned and self.batch.longest > SHORT_TOKENS

    @property
    def work_class(self) -> int:
        """The work class of its rows, by their mean length."""
        # The first row stands for all: rows with and without images have different batch keys.
        images = self.batch.requests[0].prompt.images
        return work_class(self.batch.tokens // len(self.entries), has_images=images is not None)

    async def deliver(self, rows: RowValues) -> None:
        """Finish the entries with their outputs, all entries of a submitter together.

        Cancellation: between two slices; the entries that are left are not settled.
        """
        launched, forward_s, copy_s = self.launched, self.forward_s, self.copy_s
        outcomes = [
            (entry, PoolingOutput(values, launched - entry.queued_at, forward_s, copy_s))
            for entry, values in zip(self.entries, rows, strict=True)
        ]
        await deliver(outcomes, slowly=self.is_planned)


async def deliver(outcomes: Iterable[Outcome], *, slowly: bool = False) -> None:
    """Finish entries with their outputs, all entries of a submitter together.

    Cancellation: between two slices; the entries that are left are not settled.
    """
    # The rows of a submitter have the same ``settled``: a request of many rows is woken once, not once for each row.
    of_submitter: dict[Settled, list[Outcome]] = {}
    for outcome in outcomes:
        of_submitter.setdefault(outcome[0].settled, []).append(outcome)
    # ``settled`` has no checkpoint, so the rows of one call bound how long the event loop stands still.
    slices = [
        rows[begin : begin + MAX_DELIVERED_ROWS]
        for rows in of_submitter.values()
        for begin in range(0, len(rows), MAX_DELIVERED_ROWS)
    ]
    for index, rows in enumerate(slices, start=1):
        for entry, output in rows:
            entry.output = output
        rows[0][0].settled([entry for entry, _ in rows])
        # Planned batches have thousands of rows; connections are served between them.
        if slowly or index % SUBMITTERS_BETWEEN_CHECKPOINTS == 0:
            await trio.lowlevel.checkpoint()


@define(eq=False)
class Device(ABC):
    """Computes batches. The dispatcher gives it a batch whenever it has room, and tells it when its room is free again.

    The model in this process is one device, and so is each device server.
    """

    computes_ahead: ClassVar[bool] = False
    """Whether the device takes a batch while it computes another: then further long rows delay no short ones there."""
    facts: RunnerFacts = field(init=False)
    """Facts about the loaded model; of a device server, those in its latest ``Hello``."""
    in_flight: list[InFlightBatch] = field(init=False, factory=list)
    """Batches that are launched and have not returned, in the order of their launches."""
    passes: PassCost = field(init=False, factory=PassCost)
    zone: str = field(default="", init=False)
    """The zone of the process that computes; empty if it has none."""
    launches: int = field(default=1, init=False)
    """How many batches the device computes at a time."""
    freed_at: float = field(default=0.0, init=False)
    """When the latest batch returned, by ``time.perf_counter``; 0 before the first."""

    @property
    @abstractmethod
    def takes_rows(self) -> bool:
        """Whether rows may be admitted for the device: it is ready and not draining."""

    @property
    @abstractmethod
    def stall_reason(self) -> str:
        """Why the device does not answer, although it is ready; empty if it answers."""

    @property
    @abstractmethod
    def room(self) -> int:
        """How many more batches may be launched now, if available: see ``LocalDevice`` and ``RemoteDevice``."""

    @property
    def ahead_room(self) -> int:
        """How many batches may be launched now that wait until another one is computed."""
        # Only a launch thread of this process can wait for another batch; a device server gets batches by ``CREDITS``.
        return 0

    @abstractmethod
    def planned_room(self, *, others_wait: bool) -> int:
        """Return how many more planned batches may be launched now, if the device is available."""

    @property
    @abstractmethod
    def limits(self) -> BatchLimits:
        """The limits of the next batch."""

    @property
    def long_batches(self) -> int:
        """How many of its batches have long rows, at most as many as it computes at a time."""
        return min(self.launches, sum([batch.is_long for batch in self.in_flight]))

    @abstractmethod
    async def launch(self, batch: InFlightBatch) -> bool:
        """Launch a batch; return when another one may be launched, if there is room.

        Returns whether to call ``collect``. If not, the device frees the batch's room at the dispatcher and delivers
        its rows itself. Cancellation: at once; a launch that has begun is left to its thread.
        """

    async def collect(self, batch: InFlightBatch) -> RowValues | None:
        """Wait for a launched batch, and return its outputs; ``None`` if its rows are settled.

        Raises ``RunnerDeadError`` if no later batch can succeed. Cancellation: at once; the device goes on.
        """
        # Not abstract: the method is never called on a device whose ``launch`` returns ``False``.
        raise NotImplementedError

    def note_freed(self, batches: Sequence[InFlightBatch]) -> None:
        """Note that batches, which were computed together, have returned."""
        for batch in batches:
            self.in_flight.remove(batch)
            # In the loop: a message of a device server may free no batch, and then this time must not move.
            self.freed_at = time.perf_counter()

    def done_in_s(self, tokens: int) -> float:
        """Return the seconds until the device would have computed ``tokens`` more, after its batches in flight.

        Batches in flight may be overdue. Then the device is assumed to need as long again as it is late.
        """
        # With fewer batches in flight than launches, the next one begins at once, beside them.
        free_in_s = 0.0
        if len(self.in_flight) >= self.launches:
            seconds = sum([self.passes.seconds(each.batch.tokens) for each in self.in_flight]) / self.launches
            # The oldest batch began when it was launched, or when the one before it was done.
            began = max(self.in_flight[0].launched, self.freed_at)
            free_in_s = abs(began + seconds - time.perf_counter())
        return free_in_s + self.passes.seconds(tokens)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {len(self.in_flight)} batches in flight, room for {self.room}>"

"""The device of this process: a thread that launches batches on a worker's runner."""

import time
from typing import TYPE_CHECKING, Literal, TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_recovery import Fault
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import Device
from trio_pool_serve.engine.in_flight import InFlightBatch, RowValues

if TYPE_CHECKING:
    from trio_pool_serve.engine.worker import Worker

MAX_IN_FLIGHT = 2
"""Batches of one launch thread that are launched and not yet copied to the host: one is copied while the next one is
computed."""

ThreadKind: TypeAlias = Literal["launch", "background"]
"""background: launches planned batches, which are computed at idle priority."""


@define(eq=False, repr=False)
class LaunchThread(Device):
    """One of a worker's threads, with room for ``MAX_IN_FLIGHT`` batches: one is copied while the next is computed."""

    worker: "Worker"
    kind: ThreadKind = "launch"
    launching: trio.Lock = field(init=False, factory=trio.Lock)
    """Held for each launch: a batch that is computed again takes turns with new ones."""
    _faults: dict[InFlightBatch, Fault] = field(init=False, factory=dict)
    """Of batches whose launch failed."""

    def __attrs_post_init__(self) -> None:
        self.bulk = self.worker.bulk

    @property
    def room(self) -> int:  # noqa: D102
        return MAX_IN_FLIGHT - len(self.in_flight) if self.kind == "launch" else 0

    def planned_room(self, *, others_wait: bool) -> int:  # noqa: D102
        if self.kind == "background":
            return 1 - len(self.in_flight)
        return 0 if others_wait or self.worker.loaded.background_launches else self.room

    def limits(self, *, leaves_long: bool) -> BatchLimits:  # noqa: D102
        worker = self.worker
        return BatchLimits(worker.budget.tokens, self.bulk.tokens, worker.loaded.pads, leaves_long)

    @property
    def launches(self) -> int:  # noqa: D102
        return int(self.kind == "launch")

    async def launch(self, batch: InFlightBatch) -> bool:  # noqa: D102
        self.worker.observe(batch)
        fault = await self.worker.launch(batch, self)
        if fault is not None:
            self._faults[batch] = fault
        return True

    async def collect(self, batch: InFlightBatch) -> RowValues | None:  # noqa: D102
        fault = self._faults.pop(batch, None)
        if fault is None:
            if batch.handle is None:
                return None
            rows = await self.worker.outputs(batch)
            if not isinstance(rows, Fault):
                self._note_done(batch)
                return rows
            fault = rows
        await self.worker.recover(batch, fault, self)
        return None

    def _note_done(self, batch: InFlightBatch) -> None:
        if batch.is_planned:
            return  # how long it took depends on what others computed
        batch.device_s = time.perf_counter() - max(batch.launched, self.freed_at)
        self.worker.note_done(batch)

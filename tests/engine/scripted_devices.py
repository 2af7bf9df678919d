"""Devices whose passes take set times, and a dispatcher at work on them in a clock that the test moves."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import trio
from attrs import define, field
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import Device, InFlightBatch
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

MAX_TOKENS = 1024

groups = iter(range(1, 2**62))


@define(eq=False)
class ScriptedDevice(Device):
    """Computes one batch after the other, in ``overhead_s`` and ``token_s`` for each token."""

    computes_ahead: ClassVar[bool] = True
    takes_rows = True
    token_s: float = 1e-4
    overhead_s: float = 1e-3
    credits: int = 2
    planned_launches: int = 0
    zone: str = ""
    stall_reason: str = ""
    batches: list[InFlightBatch] = field(init=False, factory=list)
    """All that were launched, in order."""
    done_at: dict[InFlightBatch, float] = field(init=False, factory=dict)
    """Of those in flight."""

    @property
    def room(self) -> int:
        return self.credits - sum(not batch.is_planned for batch in self.in_flight)

    def planned_room(self, *, others_wait: bool) -> int:
        most = self.planned_launches or (0 if others_wait else 1)
        return most - sum(batch.is_planned for batch in self.in_flight)

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(MAX_TOKENS)

    def seconds(self, batch: InFlightBatch) -> float:
        return self.overhead_s + self.token_s * batch.batch.tokens

    async def launch(self, batch: InFlightBatch) -> bool:
        begins = max([trio.current_time(), *self.done_at.values()])
        self.done_at[batch] = begins + self.seconds(batch)
        self.batches.append(batch)
        await trio.lowlevel.checkpoint()
        return False

    @property
    def rows(self) -> list[int]:
        return [len(batch.entries) for batch in self.batches]


@define(eq=False)
class Floor:
    """A dispatcher at work on devices; nothing happens but what a test lets happen."""

    clock: MockClock
    nursery: trio.Nursery
    dispatcher: Dispatcher = field(init=False)
    queue: Scheduler = field(init=False, factory=Scheduler)
    devices: list[ScriptedDevice] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        metrics = Metrics().of_engine("m")
        self.dispatcher = Dispatcher(self.queue, metrics.busy)

    def use(self, *devices: ScriptedDevice) -> Sequence[ScriptedDevice]:
        """Begin to work with these devices."""
        self.devices = [*devices]
        self.dispatcher.devices = self.devices
        self.nursery.start_soon(self.dispatcher.pull, self.nursery)
        return devices

    def put(self, *lengths: int) -> list[QueueEntry]:
        """Have one request's rows wait."""
        group = next(groups)
        prompts = [RenderedPrompt(np.full(each, group, np.int32)) for each in lengths]
        return self.submit(*[PoolingRequest(prompt, group=group) for prompt in prompts])

    def put_planned(self, count: int) -> list[QueueEntry]:
        """Have planned batches of one row each wait."""
        row = PoolingRequest(RenderedPrompt(np.ones(16, np.int32)))
        return [entry for _ in range(count) for entry in self.submit(replace(row, planned=next(groups)))]

    def submit(self, *rows: PoolingRequest) -> list[QueueEntry]:
        entries = [QueueEntry(row, queued_at=trio.current_time()) for row in rows]
        self.queue.put_nowait(*self.dispatcher.lost.fail_refused(entries))
        return entries

    async def put_on(self, device: ScriptedDevice, *lengths: int) -> list[QueueEntry]:
        """Launch one request's rows on a device, as if the others were not available."""
        others = [each for each in self.devices if each is not device and not each.stall_reason]
        for other in others:
            other.stall_reason = "stalled"
        entries = self.put(*lengths)
        await wait_all_tasks_blocked()
        for other in others:
            other.stall_reason = ""
        self.dispatcher.note_room()
        return entries

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass, and finish the batches that are done in it when they are."""
        until = trio.current_time() + seconds
        await wait_all_tasks_blocked()
        while (now := trio.current_time()) < until - 1e-9:
            soonest = min((each for each in self.devices if each.done_at), key=done_at, default=None)
            done = math.inf if soonest is None else done_at(soonest)
            self.clock.jump(max(0.0, min(until, done, now + self.dispatcher.look_again_s) - now))
            await wait_all_tasks_blocked()
            if soonest is not None and trio.current_time() > done - 1e-9:
                self.finish(soonest)
                await wait_all_tasks_blocked()

    def finish(self, device: ScriptedDevice) -> None:
        """Finish the batch of a device that is done first."""
        batch = min(device.done_at, key=device.done_at.get)
        del device.done_at[batch]
        batch.device_s = 0.0 if batch.is_planned else device.seconds(batch)
        self.dispatcher.free(device, batch)
        for entry in batch.entries:
            if not entry.is_settled:
                entry.output = SimpleNamespace(device=device)
                entry.settled([entry])

    def lose(self, device: ScriptedDevice) -> None:
        """Lose a device, as a ``RemoteDevice`` does."""
        lost = [*device.in_flight]
        device.in_flight.clear()
        device.done_at.clear()
        self.dispatcher.lose(device, lost, [], EngineProcessDiedError("It has died."))


def done_at(device: ScriptedDevice) -> float:
    return min(device.done_at.values())


async def warm_up(floor: Floor) -> None:
    """Have each device compute a batch of each of several sizes, so that its speed is known."""
    for tokens in (16, 64, 256, MAX_TOKENS):
        for device in floor.devices:
            await floor.put_on(device, tokens)
            await floor.pass_time(10.0)
    for device in floor.devices:
        assert len(device.batches) == 4
        device.batches.clear()

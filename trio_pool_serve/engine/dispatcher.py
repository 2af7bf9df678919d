"""Gives each device a batch when it has room, and not before.

``pull`` waits for room, then for a moment for further rows; it takes a batch and launches it, and delivers its outputs.
So the rows of a batch are chosen when it can be computed, from all rows that wait at that moment. The room is free
again before outputs are delivered.

``devices_in_turn`` says which device gets a batch, and ``LostRows`` keeps the rows of devices that were lost.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio
from attrs import define, evolve, field
from prometheus_client import Counter

from trio_pool_serve.engine.batch_source import BatchSource
from trio_pool_serve.engine.device import Device, InFlightBatch
from trio_pool_serve.engine.device_choice import devices_in_turn, leaves_long
from trio_pool_serve.engine.lost_rows import LostRows
from trio_pool_serve.engine.queue_entry import fail_unsettled
from trio_pool_serve.engine.speed import ComputeRates
from trio_pool_serve.errors import EngineDeadError, EngineProcessDiedError
from trio_pool_serve.types import CopiedBatch

STOPPED = "The engine has stopped."

ARRIVAL_ROUNDS = 4
"""Rounds of the event loop that a request needs from its arrival until its rows are queued."""


@define(eq=False)
class Dispatcher:
    """Takes batches from ``source`` for the ``devices`` of one model, and settles their rows."""

    source: BatchSource
    busy: Counter
    """Counts the seconds in which batches were in flight."""
    on_computed: Callable[[InFlightBatch], None] = lambda _: None
    """Called with each batch before its outputs are delivered."""
    zone: str = ""
    rates: ComputeRates = field(factory=ComputeRates)
    devices: list[Device] = field(init=False, factory=list)
    is_closed: bool = field(init=False, default=False)
    """Whether no row will be computed any more."""
    look_again_s: float = field(init=False, default=math.inf)
    """Seconds after which another device may get the waiting rows."""
    lost: LostRows = field(factory=LostRows)
    others_tokens: int = field(init=False, default=0)
    """Tokens that the devices have computed for other processes since the latest batch of this process.

    Negative while the answers to a batch arrive in several frames: the device has not reported all of its tokens."""
    room: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    """Unparked when a device has more room."""
    _busy_since: float | None = field(init=False, default=None)
    """Start of the period with batches in flight that is not in ``busy`` yet; ``None`` while no batch is in flight."""

    @property
    def in_flight(self) -> list[InFlightBatch]:
        """The batches that are launched and have not returned."""
        return [batch for device in self.devices for batch in device.in_flight]

    @property
    def serving(self) -> Sequence[Device]:
        """The devices that take rows; if all are draining, all of them: admitted rows depend on them."""
        return [each for each in self.devices if each.takes_rows] or self.devices

    @property
    def available(self) -> Sequence[Device]:
        """The devices that get batches when they have room."""
        return [each for each in self.serving if not each.stall_reason]

    @property
    def oldest_in_flight_s(self) -> float:
        """Seconds since the launch of the oldest batch in flight that is not planned; 0 without one."""
        now = time.perf_counter()
        return max((now - batch.launched for batch in self.in_flight if not batch.is_planned), default=0.0)

    @property
    def has_waiting(self) -> bool:
        """Whether rows wait, including rows of lost devices."""
        return self.source.tokens > 0 or len(self.lost.suspects) > 0

    async def pull(self, nursery: trio.Nursery) -> NoReturn:
        """Launch batches on the devices, forever; tasks in ``nursery`` settle them.

        If launches wait for the device, one task pulls for each batch that may be launched at a time. Rows that arrive
        wake one of these tasks, and it wakes the next one if it leaves rows. Cancellation: at once; batches remain in
        flight.
        """
        while True:
            await self._gather()
            taken = self._take()
            if taken is None:
                await self._wait()
                continue
            device, batch = taken
            # Before the launch, which may wait for a thread: other tasks that pull must see that this room is taken.
            device.in_flight.append(batch)
            self._count_busy()
            # The arrival has woken this task only, which may be busy with the launch for the whole pass.
            if self.source.tokens or self.source.planned:
                self.source.changed.unpark()
            if not await device.launch(batch):
                continue  # a device server: its link delivers the rows
            is_copied = isinstance(batch.handle, CopiedBatch) and len(batch.handle.rows) == 1 == len(batch.entries)
            if is_copied and not self.has_waiting:
                await self._finish(device, batch)  # this does not wait: a task would cost a round of the event loop
            else:
                nursery.start_soon(self._finish, device, batch)

    async def _gather(self) -> None:
        """Wait for the rows of requests that have arrived already. Cancellation: at once.

        Clients that were answered together send their next requests one after the other. Without waiting, the first of
        their rows would be a batch, and the others would wait for it.
        """
        available = self.available if self.source.tokens else ()
        # A pass less saves the constant part of its time, and no more. Before anything was measured this is 0.
        constants_s = [each.passes.constant_s for each in available if each.room > 0 or each.ahead_room > 0]
        until = time.perf_counter() + max(constants_s, default=0.0)
        for _ in range(ARRIVAL_ROUNDS):
            if not self.source.tokens or time.perf_counter() >= until:
                return
            await trio.lowlevel.checkpoint()

    async def _wait(self) -> None:
        """Wait until there may be a batch to take: for room, or if there is room, for rows."""
        available = self.available
        if not [each for each in available if each.room > 0 or each.ahead_room > 0]:
            is_planned_room = any(each.planned_room(others_wait=False) > 0 for each in available)
            # Not for rows: without room, each arrival would wake this task for nothing.
            await (self.source.planned_changed if is_planned_room else self.room).park()
        elif math.isinf(self.look_again_s):
            await self.source.changed.park()  # a cancel scope would be a tenth of a lone request's calls
        else:
            with trio.move_on_after(self.look_again_s):
                await self.source.changed.park()

    def _take(self) -> tuple[Device, InFlightBatch] | None:
        """Take a batch for one of the devices that have room; ``None`` if there is none."""
        self.look_again_s = math.inf
        if not (self.has_waiting or self.source.planned):
            self.rates.note_idle()
            return None
        available = self.available
        # A device that may die again takes nothing else, so that no other row sees a second loss with the suspect.
        held = self.lost.device_for(available)
        if held is not None and not held.in_flight:
            return held, InFlightBatch([self.lost.suspects.popleft()], is_suspect=True)
        devices = [each for each in available if each is not held]
        in_turn, self.look_again_s = devices_in_turn(devices, self.source, self.zone)
        for device in in_turn:
            if entries := self.source.take(device.limits, leaves_long=leaves_long(device, available)):
                return device, InFlightBatch(entries)
        others_wait = self.source.tokens > 0
        for device in devices:
            # Rows that arrive later wait until this batch is computed, so it is taken only if it is short, and only if
            # it contains all rows: with more rows waiting, there is a batch to launch when the device is free.
            if device.room <= 0 < device.ahead_room and 0 < self.source.tokens <= device.passes.short_tokens:
                limits = device.limits
                limits = evolve(limits, max_tokens=min(limits.max_tokens, device.passes.short_tokens))
                if entries := self.source.take(limits, leaves_long=True):
                    return device, InFlightBatch(entries, kind="ahead")
        if not others_wait:
            self.rates.note_idle()
        for device in devices:
            if device.planned_room(others_wait=others_wait) > 0 and (entries := self.source.take_planned()):
                return device, InFlightBatch(entries)
        return None

    def note_room(self) -> None:
        """Wake the tasks that wait for a batch: there may be more room, or rows that may be taken now."""
        self._count_busy()
        self.room.unpark_all()
        self.source.planned_changed.unpark()
        if self.has_waiting or self.source.planned:
            self.source.changed.unpark()

    def _count_busy(self) -> None:
        """Count the seconds until now if batches were in flight; overlapping batches count once."""
        now = time.perf_counter()
        if self._busy_since is not None:
            self.busy.inc(now - self._busy_since)
        self._busy_since = now if [each for each in self.devices if each.in_flight] else None

    async def _finish(self, device: Device, batch: InFlightBatch) -> None:
        """Free the room of a batch, and settle its rows."""
        rows = await device.collect(batch)
        self.free(device, batch)
        try:
            if rows is not None:
                await batch.deliver(rows)
        finally:  # rows that are left were abandoned, or the delivery was cancelled because the engine ends
            fail_unsettled(batch.entries, EngineDeadError(STOPPED))

    def free(self, device: Device, *batches: InFlightBatch) -> None:
        """Free the room of batches that were computed together; the next one may be taken before they are delivered."""
        device.note_freed(batches)
        self.note_room()  # first: the next batch is launched while this one is counted and delivered
        self._observe(device, batches)
        for batch in batches:
            self.on_computed(batch)

    def _observe(self, device: Device, batches: Sequence[InFlightBatch]) -> None:
        measured = [batch for batch in batches if batch.device_s]
        if not measured:
            # Computed again in parts, or not at all: this time is no measurement, nor does it count for the next batch.
            if not all(batch.is_planned for batch in batches):
                self.rates.drain_s(device.freed_at, device.freed_at, left_waiting=False)
            return
        for batch in measured:
            device.passes.observe(batch.batch.tokens, batch.device_s)
        left_waiting, was_left = self.source.tokens > 0, self.rates.left_waiting
        # All devices drain one queue: the time until the latest batch, of any device, has been counted already.
        seconds = self.rates.drain_s(measured[0].launched, device.freed_at, left_waiting=left_waiting)
        tokens = sum([batch.batch.tokens for batch in measured]) + max(0, self.others_tokens)
        self.others_tokens = 0
        if was_left or not device.computes_ahead:  # else it may have had rows of other processes before these
            self.rates.observe(measured[0].work_class, tokens, seconds, left_waiting=left_waiting)

    def add(self, device: Device) -> None:
        """Give batches to a device from now on."""
        self.devices.append(device)
        self.note_room()

    def lose(
        self,
        device: Device,
        launched: Sequence[InFlightBatch],
        unsent: Sequence[InFlightBatch],
        error: EngineProcessDiedError,
    ) -> None:
        """Give no more batches to a device that was lost with these batches; see ``LostRows`` for their rows.

        Without another device, all waiting rows fail: it may take minutes until there is one.
        """
        # First: if this was the last device, ``fail_waiting`` fails these rows, too.
        for batch in unsent:
            self.lost.give_back(batch)
        self.devices = [each for each in self.devices if each is not device]
        if not self.devices:
            self.fail_waiting(error)
        for batch in launched:
            self.lost.lose(batch, error, has_devices=bool(self.devices))
        self.note_room()

    def fail_waiting(self, error: Exception) -> None:
        """Fail all waiting rows, including background work and rows of lost devices."""
        waiting = [*self.source.take_all(), *self.lost.suspects]
        self.lost.suspects.clear()
        fail_unsettled(waiting, error)

    def close(self) -> None:
        """Fail all rows that are not settled, launched ones included: no row will be computed any more."""
        self.is_closed, stopped = True, EngineDeadError(STOPPED)
        self.fail_waiting(stopped)
        devices, self.devices = self.devices, []
        for device in devices:
            launched = [entry for batch in device.in_flight for entry in batch.entries]
            device.in_flight.clear()
            fail_unsettled(launched, stopped)
        self.note_room()  # wakes tasks in ``wait_ready``

    async def wait_ready(self) -> None:
        """Wait until there is a device. Raises ``EngineDeadError`` if this is closed. Cancellation: at once."""
        await trio.lowlevel.checkpoint()
        while not self.devices and not self.is_closed:
            await self.room.park()
        if self.is_closed:
            raise EngineDeadError(STOPPED)

    def __repr__(self) -> str:
        return f"<Dispatcher, {len(self.devices)} devices, {len(self.in_flight)} batches in flight, {self.source!r}>"

"""Gives each device a batch when it has room, and not before.

``pull`` waits for room, then for a moment for further rows; it takes a batch and launches it, and another task delivers
it. So the rows of a batch are chosen when it can be computed, from all rows that wait at that moment. The room is free
again before outputs are delivered.

Among several device servers, a batch goes to the one expected to finish it first, by the time that batches of its size
took there: a slow idle server leaves a lone row to a fast one that will be free soon. A server in another zone takes
only rows that have waited for ``OTHER_ZONE_S``. While there are short rows, one device is kept free of long ones.

If a device is lost, its rows are computed again by another device, one at a time and alone there: one of them may have
killed it. A row that has seen ``MAX_LOSSES`` is refused, and so are equal rows: see ``RefusedRows``.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio
from attrs import define, field
from prometheus_client import Counter
from trio.lowlevel import ParkingLot

from trio_pool_serve.engine.batch_source import BatchSource
from trio_pool_serve.engine.compute_rates import ComputeRates, class_of
from trio_pool_serve.engine.device import Device, InFlightBatch
from trio_pool_serve.engine.queue_entry import QueueEntry, fail_unsettled
from trio_pool_serve.engine.refused_rows import RefusedRows
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import DeadlineExceededError, EngineDeadError, EngineProcessDiedError
from trio_pool_serve.types import CopiedBatch

STOPPED = "The engine has stopped."

OTHER_ZONE_S = 0.05
"""Between zones, bytes cost money and about a millisecond."""

MAX_LOSSES = 2

QUIET_ROUNDS = 4
"""Rounds of the event loop that a request needs from its arrival until its rows are queued."""

GATHER_SHARE = 0.2
"""The longest wait for further rows, as a share of the shortest pass: much of that pass is a cost of any pass, however
few its rows. 8 clients of a model of base size get 1.3 times as many responses per second (docs/profile.md)."""

MAX_GATHER_S = 0.01
"""If only long passes have been measured, a fifth of the shortest would be far more than a pass costs."""


@define(eq=False)
class Dispatcher:
    """Takes batches from ``source`` for the ``devices`` of one model, and settles their rows."""

    source: BatchSource
    busy: Counter
    """Counts the seconds in which batches were in flight."""
    on_computed: Callable[[InFlightBatch], None] = lambda _: None
    """Called with each batch before its outputs are delivered."""
    zone: str = ""
    devices: list[Device] = field(init=False, factory=list)
    is_closed: bool = field(init=False, default=False)
    """Whether no row will be computed any more."""
    rates: ComputeRates = field(init=False, factory=ComputeRates)
    refused: RefusedRows = field(init=False, factory=RefusedRows)
    others_tokens: int = field(init=False, default=0)
    """Tokens that the devices have computed for other processes since this one's last batch; briefly below 0 if answers
    come in several frames."""
    room: ParkingLot = field(init=False, factory=ParkingLot)
    """Unparked when a device has more room."""
    _look_again_s: float = field(init=False, default=math.inf)
    """Seconds after which another device may get the waiting rows."""
    _suspects: deque[QueueEntry] = field(init=False, factory=deque)
    """Rows of lost devices that wait to be computed again."""
    _behind: list[InFlightBatch] = field(init=False, factory=list)
    """Batches of this process's devices that wait until another is computed, the next in turn first."""
    _busy_since: float | None = field(init=False, default=None)
    """The time up to which seconds with batches in flight are counted; ``None`` while there are none."""

    @property
    def in_flight(self) -> list[InFlightBatch]:
        """The batches that are launched and have not returned."""
        return [batch for device in self.devices for batch in device.in_flight]

    @property
    def oldest_in_flight_s(self) -> float:
        """Seconds since the launch of the oldest batch in flight that is not planned; 0 without one."""
        now = time.perf_counter()
        return max((now - batch.launched for batch in self.in_flight if not batch.is_planned), default=0.0)

    @property
    def all_compute(self) -> bool:
        """Whether each device that computes has a batch."""
        return all(device.in_flight for device in self.devices if device.launches)

    async def pull(self, devices: Sequence[Device], nursery: trio.Nursery) -> NoReturn:
        """Launch batches on some of the devices, forever; tasks in ``nursery`` settle them.

        A device that blocks in ``launch`` has a task of its own. Cancellation: at once; batches in flight stay so.
        """
        while True:
            await self._gather(devices)
            taken = self._take(devices)
            if taken is None:
                await self._wait(devices)
                continue
            device, batch = taken
            device.in_flight.append(batch)
            self._count_busy()
            self._note_launch(batch)
            if not await device.launch(batch):
                continue
            is_copied = isinstance(batch.handle, CopiedBatch) and len(batch.handle.rows) == 1 == len(batch.entries)
            if is_copied and not self.has_waiting:
                await self._finish(device, batch)  # this does not wait: a task would cost a round of the event loop
            else:
                nursery.start_soon(self._finish, device, batch)

    def _note_launch(self, batch: InFlightBatch) -> None:
        if batch.is_planned or not any(device.takes_ahead for device in self.devices):
            return
        launched = [each for each in self.in_flight if not each.is_planned]
        if len(launched) > sum(device.launches for device in self.devices):
            self._behind.append(batch)
        elif self.has_waiting and self.all_compute:
            self.source.changed.unpark_all()  # a batch may be taken ahead

    async def _gather(self, devices: Sequence[Device]) -> None:
        """Wait while rows keep arriving that could join the next batch. Cancellation: at once.

        Clients that were answered together send their next requests one after the other. Without waiting, the first of
        their rows would be a batch, and the others would wait for it.
        """
        shortest_s = min([each.shortest_pass_s for each in devices], default=0.0)
        until = time.perf_counter() + min(MAX_GATHER_S, GATHER_SHARE * shortest_s)
        quiet, waiting = 0, len(self.source)
        while waiting and quiet < QUIET_ROUNDS and time.perf_counter() < until:
            if all(each.room <= 0 for each in devices):
                return
            await trio.lowlevel.checkpoint()
            waiting, before = len(self.source), waiting
            quiet = quiet + 1 if waiting == before else 0

    async def _wait(self, devices: Sequence[Device]) -> None:
        """Wait until there may be a batch to take: for room, or if there is room, for rows."""
        available = [each for each in devices if each.is_available]
        takes_rows = any(each.room > 0 or (each.takes_ahead and not each.in_flight) for each in available)
        if not takes_rows and not any(each.planned_room(others_wait=False) > 0 for each in available):
            await self.room.park()
        elif not any(each.launches or each.takes_ahead for each in available):
            await self.source.planned_changed.park()
        elif math.isinf(self._look_again_s):
            await self.source.changed.park()  # a cancel scope would be a tenth of a lone request's calls
        else:
            with trio.move_on_after(self._look_again_s):
                await self.source.changed.park()

    def _take(self, devices: Sequence[Device]) -> tuple[Device, InFlightBatch] | None:
        """Take a batch for one of the devices that have room; ``None`` if there is none."""
        self._look_again_s = math.inf
        if not (self.has_waiting or self.source.planned):
            self.rates.note_idle()
            return None
        devices = [each for each in devices if each.is_available]
        held = next((each for each in devices if each.in_flight and each.in_flight[0].is_suspect), None)
        if held is None and devices and (suspect := self._next_suspect()) is not None:
            held = min(devices, key=lambda each: len(each.in_flight))  # gets no other batch until it has none
            if not held.in_flight:
                self._suspects.popleft()
                return held, InFlightBatch([suspect], is_suspect=True)
        devices = [each for each in devices if each is not held]
        for device in self._in_turn(devices):
            if entries := self.source.take(device.limits, leaves_long=self._leaves_long(device)):
                return device, InFlightBatch(entries)
        others_wait = len(self.source) > 0
        if not others_wait:
            self.rates.note_idle()
        for device in devices:
            if device.planned_room(others_wait=others_wait) > 0 and (entries := self.source.take_planned()):
                return device, InFlightBatch(entries)
        return None

    def _in_turn(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the devices that may get the next batch now, starting with the one that would finish it first.

        A device gets the rows that the ones before it leave: long rows.
        """
        free = [each for each in devices if each.room > 0]
        if len(devices) == 1 or not free or not len(self.source):
            return free
        in_zone = [each for each in devices if each.zone == self.zone]
        if self.zone and in_zone and (waited_s := self.source.oldest_s) < OTHER_ZONE_S:
            devices, free = in_zone, [each for each in free if each in in_zone]
            if not free:
                self._look_again_s = OTHER_ZONE_S - waited_s
                return free
        now, waiting = time.perf_counter(), self.source.tokens

        def done_in_s(device: Device) -> float:
            return device.free_in_s(now) + device.pass_s(waiting)

        seconds = min(map(done_in_s, free))
        for busy in devices:
            if busy not in free and done_in_s(busy) < seconds:
                waiting -= busy.limits.max_tokens
        if waiting <= 0:
            self._look_again_s = seconds
            return []
        return sorted(free, key=done_in_s)

    @property
    def has_waiting(self) -> bool:
        """Whether rows wait, including rows of lost devices."""
        return len(self.source) > 0 or len(self._suspects) > 0

    def note_room(self) -> None:
        """Wake the tasks that wait for a batch: there may be more room, or rows that may be taken now."""
        self._count_busy()
        self.room.unpark_all()
        if self.has_waiting or self.source.planned:
            self.source.changed.unpark_all()
            self.source.planned_changed.unpark_all()

    def _count_busy(self) -> None:
        """Count the seconds until now if batches were in flight; overlapping batches count once."""
        now = time.perf_counter()
        if self._busy_since is not None:
            self.busy.inc(now - self._busy_since)
        self._busy_since = now if any(device.in_flight for device in self.devices) else None

    def _leaves_long(self, device: Device) -> bool:
        """Return whether long rows are left to other devices, so that this one stays free for short ones."""
        if device.computes_ahead and device.long_batches:
            return False
        if device.takes_ahead:
            return True
        devices = [each for each in self.devices if each.is_available]
        most = sum([each.launches for each in devices]) - 1
        return 0 < most <= sum([min(each.launches, each.long_batches) for each in devices])

    async def _finish(self, device: Device, batch: InFlightBatch) -> None:
        """Free the room of a batch, and settle its rows."""
        rows = await device.collect(batch)
        self.free(device, batch)
        try:
            if rows is not None:
                await batch.deliver(rows)
        finally:  # no client waits for rows without an output, unless the engine ends
            fail_unsettled(batch.entries, EngineDeadError(STOPPED))

    def free(self, device: Device, *batches: InFlightBatch) -> None:
        """Free the room of batches that were computed together; the next one may be taken before they are delivered."""
        for batch in batches:
            device.in_flight.remove(batch)
        device.freed_at = time.perf_counter()
        self._behind = [batch for batch in self._behind if batch not in batches and batch.handle is None]
        if self._behind and not batches[0].is_planned:
            self._behind.pop(0).launched = device.freed_at
        self.note_room()
        self._observe(device, batches)
        for batch in batches:
            self.on_computed(batch)

    def _observe(self, device: Device, batches: Sequence[InFlightBatch]) -> None:
        measured = [batch for batch in batches if batch.device_s]
        if not measured:
            if not all(batch.is_planned for batch in batches):  # some were computed again, in parts
                self.rates.drain_s(device.freed_at, device.freed_at, left_waiting=False)
            return
        for batch in measured:
            device.observe(batch)
        left_waiting, was_left = len(self.source) > 0, self.rates.left_waiting
        # Without the time in which earlier batches were computed, on any device.
        seconds = self.rates.drain_s(measured[0].launched, device.freed_at, left_waiting=left_waiting)
        tokens = sum([batch.batch.tokens for batch in measured]) + max(0, self.others_tokens)
        self.others_tokens = 0
        if was_left or not device.computes_ahead:  # else it may have had rows of other processes before these
            self.rates.observe(measured[0].work_class, tokens, seconds, left_waiting=left_waiting)

    def seconds_of(self, entries: Sequence[QueueEntry]) -> float:
        """Return how long a batch of rows of about one length will take, in seconds; 0 if that is unknown."""
        per_token = float(self.rates.seconds_per_token[class_of(entries[0].request.prompt)])
        seconds = sum([entry.tokens for entry in entries]) * per_token
        return seconds if math.isfinite(seconds) else 0.0

    def lose(self, batch: InFlightBatch, lost: EngineProcessDiedError) -> None:
        """Queue the rows of a lost device for another, if there is one; refuse rows that two devices were lost with."""
        for entry in batch.waited_for:
            entry.losses += 1
            if entry.losses >= MAX_LOSSES:
                self.refused.refuse(entry)
            elif batch.is_planned or not self.devices:
                entry.fail(lost)
            else:
                self._suspects.append(entry)
        self.note_room()

    def give_back(self, batch: InFlightBatch, queue: Scheduler) -> None:
        """Queue rows again that were not yet sent to a device when it was lost: they are not why it was lost."""
        if batch.is_suspect:
            self._suspects += batch.waited_for
        elif waited_for := batch.waited_for:
            queue.put_nowait(*(batch.entries if batch.is_planned else waited_for))  # a planned batch is computed whole
        self.note_room()

    def _next_suspect(self) -> QueueEntry | None:
        """Return the first suspect; drop those before it that need not be computed any more."""
        while self._suspects:
            entry = self._suspects[0]
            if entry.request.deadline < trio.current_time():
                entry.fail(DeadlineExceededError("The deadline passed while this input was computed."))
            elif not entry.is_abandoned:
                return entry
            self._suspects.popleft()
        return None

    def fail_waiting(self, error: Exception) -> None:
        """Fail all waiting rows, including background work and rows of lost devices."""
        waiting = [*self.source.take_all(), *self._suspects]
        self._suspects.clear()
        fail_unsettled(waiting, error)

    def close(self) -> None:
        """Fail all rows that are not settled, launched ones included: no row will be computed any more."""
        self.is_closed, stopped = True, EngineDeadError(STOPPED)
        self.fail_waiting(stopped)
        for device in self.devices:
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

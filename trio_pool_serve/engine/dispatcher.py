"""Gives each device a batch as soon as it has room, and not before.

``pull`` waits for room, takes a batch, launches it and has another task deliver it, so that which rows are computed is
decided when they can be, from everything that waits then. The room is free again before outputs are delivered.

Of several device servers the one gets a batch that will have computed it first, by the time that batches of that size
took there: a slow one that is idle leaves a lone row to a fast one that will be free soon. One in another zone takes
only what has waited for ``OTHER_ZONE_S``. One device is left free of long rows, as long as there are short ones.

Rows of a device that is lost are computed again by another, one at a time and with nothing beside them there: one of
them may have killed it. A row that has seen ``MAX_LOSSES`` is refused, and so are equal ones for ``REFUSED_S``.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NoReturn, Protocol

import trio
from attrs import Factory, define, field
from prometheus_client import Counter
from trio.lowlevel import ParkingLot

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.compute_rates import ComputeRates, DrainClock
from trio_pool_serve.engine.device import Device
from trio_pool_serve.engine.in_flight import InFlightBatch, InFlightBatches
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import BatchFailedError, DeadlineExceededError, EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import BatchHistogram

OTHER_ZONE_S = 0.05
"""Between zones, bytes cost money and about a millisecond."""

MAX_LOSSES = 2

REFUSED_S = 300.0

MAX_REFUSED = 1000
"""Rows that are remembered."""

REFUSAL = "The engine process has died twice while it computed this input."


class BatchSource(Protocol):
    """What batches are taken from: a ``Scheduler``, or the parts that API processes have sent to a device server."""

    tokens: int
    changed: ParkingLot
    """Unparked when rows arrive."""

    def __len__(self) -> int:
        """Return the number of waiting rows, without those of background work."""

    def take(self, limits: BatchLimits, /) -> list[QueueEntry]:
        """Take the rows of one batch; empty if no row may be taken."""

    def take_planned(self) -> list[QueueEntry]:
        """Take the rows of a planned batch; empty if none is complete."""

    def take_all(self) -> list[QueueEntry]:
        """Take all rows, those of background work included."""

    @property
    def oldest_s(self) -> float:
        """Seconds for which the oldest row has waited; 0 if none waits."""


@define(eq=False)
class Dispatcher:
    """Takes batches from ``source`` for the ``devices`` of one model, and settles their rows."""

    source: BatchSource
    busy: Counter
    """Counts the seconds in which batches were in flight."""
    queue_times: BatchHistogram | None = None
    """Observes how long rows have waited."""
    on_computed: Callable[[InFlightBatch], None] | None = None
    """Called with each batch before its outputs are delivered."""
    zone: str = ""
    devices: list[Device] = field(init=False, factory=list)
    in_flight: InFlightBatches = field(
        init=False, default=Factory(lambda self: InFlightBatches(self.busy), takes_self=True)
    )
    rates: ComputeRates = field(init=False, factory=ComputeRates)
    others_tokens: int = field(init=False, default=0)
    """Tokens that the devices have computed for other processes since this one's last batch."""
    _drain_clock: DrainClock = field(init=False, factory=DrainClock)
    room: ParkingLot = field(init=False, factory=ParkingLot)
    """Unparked when a device has more room."""
    _look_again_s: float = field(init=False, default=math.inf)
    """After how many seconds another device may get what waits."""
    _suspects: deque[QueueEntry] = field(init=False, factory=deque)
    """Rows of lost devices, which wait to be computed again."""
    _refused: dict[bytes, tuple[bytes, float]] = field(init=False, factory=dict)
    """By the digest of a refused row's ids: the digest of all of the row, and until when it is refused."""

    async def pull(self, devices: Sequence[Device], nursery: trio.Nursery) -> NoReturn:
        """Launch batches on some of the devices, forever; tasks in ``nursery`` settle them.

        A device that blocks in ``launch`` has a task of its own. Cancellation: at once; what is in flight stays there.
        """
        while True:
            taken = self._take(devices)
            if taken is None:
                await self._wait(devices)
                continue
            device, batch = taken
            device.in_flight.append(batch)
            self.in_flight.add(batch)
            if self.queue_times is not None:
                self.queue_times.observe_all([batch.launched - entry.queued_at for entry in batch.entries])
            if await device.launch(batch):
                nursery.start_soon(self._finish, device, batch)

    async def _wait(self, devices: Sequence[Device]) -> None:
        """Wait until there may be a batch to take: for room, and only if there is some, for rows."""
        available = [each for each in devices if each.is_available]
        if not any(each.room > 0 or each.planned_room(others_wait=False) > 0 for each in available):
            await self.room.park()
        elif self._look_again_s == math.inf:
            await self.source.changed.park()
        else:
            with trio.move_on_after(self._look_again_s):
                await self.source.changed.park()

    def _take(self, devices: Sequence[Device]) -> tuple[Device, InFlightBatch] | None:
        """Take a batch for one of the devices that have room; ``None`` if there is none."""
        self._look_again_s = math.inf
        devices = [each for each in devices if each.is_available]
        held = next((each for each in devices if each.in_flight and each.in_flight[0].is_suspect), None)
        if held is None and self._suspects and devices:
            held = min(devices, key=lambda each: len(each.in_flight))  # which gets no others until it has none
            if not held.in_flight:
                if (suspect := self._next_suspect()) is not None:
                    return held, InFlightBatch([suspect], is_suspect=True)
                held = None
        devices = [each for each in devices if each is not held]
        for device in self._free(devices):
            if entries := self.source.take(device.limits(leaves_long=self._leaves_long(device))):
                return device, InFlightBatch(entries)
        self._drain_clock.note_idle()
        others_wait = len(self.source) > 0
        for device in devices:
            if device.planned_room(others_wait=others_wait) > 0 and (entries := self.source.take_planned()):
                return device, InFlightBatch(entries, is_planned=True)
        return None

    def _free(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the devices that may get the next batch now, the one that would be done with it first at the front.

        Others get what those before them leave: long rows.
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
                waiting -= busy.limits(leaves_long=False).max_tokens
        if waiting <= 0:
            self._look_again_s = seconds
            return []
        return sorted(free, key=done_in_s)

    def note_room(self) -> None:
        """Wake those that wait for a batch: there may be more room, or rows that may be taken now."""
        self.room.unpark_all()
        self.source.changed.unpark_all()

    def _leaves_long(self, device: Device) -> bool:
        """Return whether long rows are left to other devices, that this one stays free for short ones."""
        if device.computes_ahead and device.long_batches:
            return False
        devices = [each for each in self.devices if each.is_available]
        most = sum([each.launches for each in devices]) - 1
        return 0 < most <= sum([min(each.launches, each.long_batches) for each in devices])

    async def _finish(self, device: Device, batch: InFlightBatch) -> None:
        """Settle the rows of a batch, and free its room."""
        rows = await device.collect(batch)
        self.free(device, batch)
        if rows is not None:
            await batch.deliver(rows)
        self.forget(batch)

    def free(self, device: Device, *batches: InFlightBatch) -> None:
        """Free the room of batches that were computed together: the next one may be taken before they are delivered."""
        for batch in batches:
            device.in_flight.remove(batch)
        device.freed_at = time.perf_counter()
        self.note_room()
        if measured := [batch for batch in batches if batch.device_s]:
            self._observe(device, measured)
        elif not all(batch.is_planned for batch in batches):
            self._drain_clock.restart()
        if self.on_computed is not None:
            for batch in batches:
                self.on_computed(batch)

    def forget(self, batch: InFlightBatch) -> None:
        """Forget a batch whose rows are settled. Not earlier: ``fail_all`` fails the rows that are left."""
        for entry in [entry for entry in batch.entries if entry.output is None and entry.error is None]:
            entry.fail(BatchFailedError("This input was not computed: no client waits for it."))
        self.in_flight.discard(batch)

    def _observe(self, device: Device, batches: Sequence[InFlightBatch]) -> None:
        for batch in batches:
            device.observe(batch)
        left_waiting = len(self.source) > 0 or device.has_waiting
        # Without the time in which those before were computed, by whichever device.
        seconds = self._drain_clock.note_done(batches[0].launched, time.perf_counter(), left_waiting=left_waiting)
        tokens = sum([batch.batch.tokens for batch in batches]) + self.others_tokens
        self.others_tokens = 0
        self.rates.observe(batches[0].work_class, tokens, seconds, left_waiting=left_waiting)

    def seconds_of(self, entries: Sequence[QueueEntry]) -> float:
        """Return how long a batch of rows of about one length will take (seconds); 0 if that is unknown."""
        seconds = sum([entry.tokens for entry in entries]) * self.rates.of(entries[0].request.prompt)
        return seconds if math.isfinite(seconds) else 0.0

    def lose(self, batch: InFlightBatch, lost: EngineProcessDiedError) -> None:
        """Queue the rows of a lost device for another one, if there is any; refuse rows that were lost with two."""
        for entry in batch.entries:
            if entry.is_settled or entry.is_abandoned:
                continue
            entry.losses += 1
            if entry.losses >= MAX_LOSSES:
                self._refuse(entry)
            elif batch.is_planned or not self.devices:
                entry.fail(lost)
            else:
                self._suspects.append(entry)
        self.in_flight.discard(batch)
        self.note_room()

    def give_back(self, batch: InFlightBatch, queue: Scheduler) -> None:
        """Queue the rows of a batch again that a lost device has not been sent: they are not why it was lost."""
        left = [entry for entry in batch.entries if not (entry.is_settled or entry.is_abandoned)]
        if batch.is_suspect:
            self._suspects += left
        elif left:
            queue.put_nowait(*(batch.entries if batch.is_planned else left))  # a planned batch is computed whole
        self.in_flight.discard(batch)
        self.note_room()

    def _next_suspect(self) -> QueueEntry | None:
        while self._suspects:
            entry = self._suspects.popleft()
            if entry.request.deadline < trio.current_time():
                entry.fail(DeadlineExceededError("The deadline has passed while this input was computed."))
            elif not entry.is_abandoned:
                return entry
        return None

    def _refuse(self, entry: QueueEntry) -> None:
        if len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[_digest_of_ids(entry)] = _digest(entry), trio.current_time() + REFUSED_S
        entry.fail(EngineProcessDiedError(REFUSAL))

    def refuse_known(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that are equal to one that was refused within ``REFUSED_S``; return the others."""
        if not self._refused:
            return entries
        now = trio.current_time()
        self._refused = {ids: known for ids, known in self._refused.items() if known[1] > now}
        for entry in entries:
            known = self._refused.get(_digest_of_ids(entry))
            if known is not None and known[0] == _digest(entry):
                entry.fail(EngineProcessDiedError(REFUSAL))
        return [entry for entry in entries if not entry.is_settled]

    def fail_waiting(self, error: Exception) -> None:
        """Fail all rows that wait, those of background work and of lost devices included."""
        waiting = [*self.source.take_all(), *self._suspects]
        self._suspects.clear()
        _fail(waiting, error)

    def fail_all(self, error: Exception) -> None:
        """Fail all rows that are not settled, those that are launched included."""
        self.fail_waiting(error)
        launched = [entry for batch in self.in_flight for entry in batch.entries]
        self.in_flight.clear()
        _fail(launched, error)

    def __repr__(self) -> str:
        return f"<Dispatcher, {len(self.devices)} devices, {len(self.in_flight)} batches in flight, {self.source!r}>"


def _fail(entries: Sequence[QueueEntry], error: Exception) -> None:
    for entry in entries:
        if not entry.is_settled:
            entry.fail(error)


def _digest_of_ids(entry: QueueEntry) -> bytes:
    return blake2b(entry.request.prompt.token_ids.tobytes(), digest_size=16).digest()


def _digest(entry: QueueEntry) -> bytes:
    """Return a digest of all that a row's computation reads; takes a millisecond for an image."""
    prompt, digest = entry.request.prompt, blake2b(digest_size=16)
    images = {} if prompt.images is None else prompt.images.arrays
    for array in (prompt.token_ids, prompt.type_ids, prompt.embeds, *images.values()):
        digest.update(b"" if array is None else array.tobytes())
    return digest.digest()

"""Which device gets what, and when: devices whose passes take set times, in a clock that the test moves."""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import trio
from attrs import define, field
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_pool_serve.engine import device as device_module
from trio_pool_serve.engine import dispatcher as dispatcher_module
from trio_pool_serve.engine import scheduler
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import MAX_DELIVERED_ROWS, Device, InFlightBatch, deliver
from trio_pool_serve.engine.device_choice import OTHER_ZONE_S
from trio_pool_serve.engine.dispatcher import QUIET_ROUNDS, Dispatcher
from trio_pool_serve.engine.lost_rows import REFUSAL, REFUSED_S
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS
from trio_pool_serve.engine.queue_entry import QueueEntry, Settled
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import DeadlineExceededError, EngineDeadError, EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.types import ImageFeatures, PoolingOutput, PoolingRequest, RenderedPrompt

MAX_TOKENS = 1024

groups = iter(range(1, 2**62))


@define(eq=False)
class ScriptedDevice(Device):
    """Computes one batch after the other, in ``overhead_s`` and ``token_s`` for each token."""

    computes_ahead: ClassVar[bool] = True
    token_s: float = 1e-4
    overhead_s: float = 1e-3
    credits: int = 2
    planned_launches: int = 0
    zone: str = ""
    is_available: bool = True
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
        self.queue.put_nowait(*self.dispatcher.lost.refused.fail_equal(entries))
        return entries

    async def put_on(self, device: ScriptedDevice, *lengths: int) -> list[QueueEntry]:
        """Launch one request's rows on a device, as if the others were not available."""
        others = [each for each in self.devices if each is not device and each.is_available]
        for other in others:
            other.is_available = False
        entries = self.put(*lengths)
        await wait_all_tasks_blocked()
        for other in others:
            other.is_available = True
        self.dispatcher.note_room()
        return entries

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass, and finish the batches that are done in it when they are."""
        until = trio.current_time() + seconds
        await wait_all_tasks_blocked()
        while (now := trio.current_time()) < until - 1e-9:
            soonest = min((each for each in self.devices if each.done_at), key=done_at, default=None)
            done = math.inf if soonest is None else done_at(soonest)
            self.clock.jump(max(0.0, min(until, done, now + self.dispatcher.choice.look_again_s) - now))
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


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is measured by the clock that the test moves."""
    clock = SimpleNamespace(perf_counter=trio.current_time)
    for module in (dispatcher_module, device_module, scheduler):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def floor(mock_clock: MockClock, nursery: trio.Nursery) -> Floor:
    return Floor(mock_clock, nursery)


async def warm_up(floor: Floor) -> None:
    """Have each device compute a batch of each of several sizes, so that its speed is known."""
    for tokens in (16, 64, 256, MAX_TOKENS):
        for device in floor.devices:
            await floor.put_on(device, tokens)
            await floor.pass_time(10.0)
    for device in floor.devices:
        assert len(device.batches) == 4
        device.batches.clear()


# -- which device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
async def test_under_saturation_each_device_computes_as_it_is_fast(mock_clock, floor, depth):
    devices = floor.use(*[ScriptedDevice(speed * 1e-4, credits=depth) for speed in (1, 2, 4)])
    await warm_up(floor)
    floor.put(*[256] * 1000)
    await floor.pass_time(10.0)
    assert len(floor.queue) > 0
    busy_s = [sum(map(device.seconds, device.batches)) for device in devices]
    assert busy_s == pytest.approx([10.0] * 3, rel=0.1)


async def test_rows_that_arrive_one_after_the_other_are_computed_together(mock_clock, floor, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "MAX_GATHER_S", 60.0)
    (device,) = floor.use(ScriptedDevice(overhead_s=600.0, credits=1))
    floor.put(16)
    await floor.pass_time(1000.0)  # it is known now how long a pass takes at least
    for _ in range(4):
        floor.put(16)
        for _ in range(QUIET_ROUNDS - 1):
            await trio.lowlevel.checkpoint()
    await wait_all_tasks_blocked()
    assert device.rows == [1, 4]


@pytest.mark.parametrize(
    ("ahead", "elapsed_s", "slow_s", "waits"),
    [
        (0, 0.02, 0.13, True),
        (1, 0.02, 0.13, True),
        (1, 0.02, 0.03, False),
        (2, 0.02, 0.13, False),
        (2, 0.09, 0.06, False),
        (2, 0.09, 0.2, True),
    ],
)
async def test_a_row_waits_for_a_fast_device_that_is_done_with_it_first(
    mock_clock, floor, ahead, elapsed_s, slow_s, waits
):
    """Each batch that is ahead takes the fast one 0.1 s, and the row takes the slow one ``slow_s``."""
    fast, slow = floor.use(ScriptedDevice(1e-4), ScriptedDevice(slow_s / 64))
    await warm_up(floor)
    await floor.put_on(fast, *[MAX_TOKENS] * ahead)
    await floor.pass_time(elapsed_s)
    (entry,) = floor.put(64)
    await floor.pass_time(0.001)
    assert len(slow.batches) == (not waits)
    await floor.pass_time(1.0)
    assert entry.output.device is (fast if waits else slow)


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_device_that_leaves_or_stalls_gets_nothing_and_is_not_waited_for(mock_clock, floor, ahead):
    fast, slow = floor.use(ScriptedDevice(1e-4), ScriptedDevice(20e-4))
    await warm_up(floor)
    floor.put(*[64] * ahead)
    await wait_all_tasks_blocked()
    fast.is_available = False
    rows = floor.put(64, 64)
    planned = floor.put_planned(1)
    await floor.pass_time(10.0)
    assert {entry.output.device for entry in rows + planned} == {slow}
    assert fast.rows == [1] * ahead


async def test_a_device_in_another_zone_gets_only_what_has_waited(mock_clock, floor):
    here, there = floor.use(ScriptedDevice(zone="here"), ScriptedDevice(1e-5, zone="there"))
    floor.dispatcher.choice.zone = "here"
    await warm_up(floor)
    (first,) = floor.put(64)
    await floor.pass_time(1.0)
    assert first.output.device is here, "though the other one is faster"
    here.overhead_s = 1.0
    floor.put(64, 512)
    await wait_all_tasks_blocked()
    (waiting,) = floor.put(64)
    await floor.pass_time(OTHER_ZONE_S / 2)
    assert there.rows == []
    await floor.pass_time(2 * OTHER_ZONE_S)
    assert waiting.output.device is there


@pytest.mark.parametrize("own", [[], [False]])
async def test_without_an_available_device_in_the_own_zone_others_get_rows_at_once(mock_clock, floor, own):
    floor.use(*[ScriptedDevice(zone="here", is_available=each) for each in own], ScriptedDevice(zone="there"))
    floor.dispatcher.choice.zone = "here"
    floor.put(64)
    await wait_all_tasks_blocked()
    assert floor.devices[-1].rows == [1]


async def test_time_in_which_two_batches_are_in_flight_counts_once_and_idle_time_does_not(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice())
    await floor.pass_time(1.0)
    floor.put(MAX_TOKENS, MAX_TOKENS)
    await wait_all_tasks_blocked()
    assert len(device.in_flight) == 2
    await floor.pass_time(10.0)
    assert floor.dispatcher.busy._value.get() == pytest.approx(sum(map(device.seconds, device.batches)))


# -- long rows, and background work ----------------------------------------------------------------------


async def test_one_device_is_left_free_of_long_rows_while_short_ones_come(mock_clock, floor):
    devices = floor.use(*[ScriptedDevice() for _ in range(3)])
    await warm_up(floor)
    most = Counter()
    for _ in range(300):
        floor.put(16)
        if len(floor.queue) < 4:
            floor.put(600)
        await floor.pass_time(0.005)
        most[sum(any(batch.is_long for batch in device.in_flight) for device in devices)] += 1
    assert max(most) == 2
    assert most[2] > 200, "the others compute them all the time"


async def test_without_short_rows_all_devices_compute_long_ones(mock_clock, floor):
    devices = floor.use(*[ScriptedDevice() for _ in range(3)])
    floor.put(*[600] * 10)
    await wait_all_tasks_blocked()
    assert [len(device.in_flight) for device in devices] == [2, 2, 2]


async def test_a_device_that_computes_long_rows_gets_the_next_while_another_is_left_free(mock_clock, floor):
    first, second = floor.use(ScriptedDevice(), ScriptedDevice())
    await warm_up(floor)
    floor.put(*[16] * 10)
    await floor.pass_time(1.0)
    floor.put(SHORT_TOKENS + 1)
    await wait_all_tasks_blocked()
    (computing,) = [device for device in (first, second) if device.in_flight]
    floor.put(SHORT_TOKENS + 1)
    await wait_all_tasks_blocked()
    assert len(computing.in_flight) == 2


async def test_two_long_batches_of_one_device_keep_one_device_busy(mock_clock, floor):
    first, second, third = floor.use(*[ScriptedDevice() for _ in range(3)])
    await warm_up(floor)
    await floor.put_on(first, 600, 600)
    assert first.rows == [1, 1]
    floor.put(*[16] * 10)
    floor.put(600)
    await wait_all_tasks_blocked()
    assert any(batch.is_long for device in (second, third) for batch in device.in_flight)


async def test_planned_batches_are_launched_when_nothing_else_waits(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice())
    floor.put(*[MAX_TOKENS] * 4)
    await wait_all_tasks_blocked()
    planned = floor.put_planned(2)
    await floor.pass_time(10.0)
    assert [batch.is_planned for batch in device.batches] == [False] * 4 + [True] * 2
    assert all(entry.is_settled for entry in planned)


async def test_a_device_with_threads_for_planned_batches_computes_them_beside_others(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice(planned_launches=1))
    floor.put(*[MAX_TOKENS] * 4)
    floor.put_planned(2)
    await wait_all_tasks_blocked()
    assert [batch.is_planned for batch in device.in_flight] == [False, False, True]


# -- rows of lost devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 200])
async def test_a_suspect_is_computed_alone_and_one_at_a_time_while_others_go_on(mock_clock, floor, others):
    lost, *left = floor.use(*[ScriptedDevice(planned_launches=1) for _ in range(3)])
    suspects = await floor.put_on(lost, *[16] * 5)
    assert lost.rows == [5]
    rows, planned = floor.put(*[64] * others), floor.put_planned(200)
    await wait_all_tasks_blocked()
    floor.lose(lost)
    seen = []
    while not all(entry.is_settled for entry in suspects):
        await floor.pass_time(1e-4)
        with_suspect = [device for device in left if any(batch.is_suspect for batch in device.in_flight)]
        assert len(with_suspect) <= 1
        for device in with_suspect:
            assert [len(batch.entries) for batch in device.in_flight] == [1]
        seen += with_suspect
    assert seen
    assert not all(entry.is_settled for entry in planned)
    await floor.pass_time(10.0)
    assert all(entry.output is not None for entry in rows + suspects)
    assert [entry.error is None for entry in planned] == [False] + [True] * 199, "one was lost"


async def test_a_suspect_is_not_given_to_a_device_that_leaves_or_stalls(mock_clock, floor):
    lost, leaving, left = floor.use(*[ScriptedDevice() for _ in range(3)])
    leaving.is_available = False
    (entry,) = await floor.put_on(lost, 16)
    floor.lose(lost)
    await floor.pass_time(1.0)
    assert (leaving.rows, left.rows, entry.losses) == ([], [1], 1)


async def test_a_row_that_two_devices_were_lost_with_is_refused_for_minutes(mock_clock, floor):
    first, second, third = floor.use(*[ScriptedDevice() for _ in range(3)])
    (row,) = await floor.put_on(first, 16)
    third.is_available = False
    floor.lose(first)
    await wait_all_tasks_blocked()
    third.is_available = True
    floor.lose(second)
    assert str(row.error) == REFUSAL
    (again,) = floor.submit(row.request)
    assert str(again.error) == REFUSAL
    prompt = RenderedPrompt(row.request.prompt.token_ids, images=ImageFeatures({"pixels": np.ones(3)}, (16,)))
    (other,) = floor.submit(replace(row.request, prompt=prompt))
    assert not other.is_settled, "it has an image besides"
    await floor.pass_time(REFUSED_S)
    (later,) = floor.submit(row.request)
    await floor.pass_time(1.0)
    assert later.output is not None


async def test_rows_of_a_lost_device_that_are_late_or_abandoned_are_not_computed_again(mock_clock, floor):
    lost, left = floor.use(ScriptedDevice(), ScriptedDevice())
    left.is_available = False
    in_time, late, abandoned = floor.put(16, 16, 16)
    late.request = replace(late.request, deadline=trio.current_time() + 1)
    (planned,) = floor.put_planned(1)
    await wait_all_tasks_blocked()
    assert [len(batch.entries) for batch in lost.in_flight] == [3, 1]
    floor.clock.jump(2)
    left.is_available = True
    abandoned.is_abandoned = True
    floor.lose(lost)
    assert isinstance(planned.error, EngineProcessDiedError)
    await floor.pass_time(1.0)
    assert isinstance(late.error, DeadlineExceededError)
    assert in_time.output is not None
    assert not abandoned.is_settled
    assert left.rows == [1]


# -- the end ---------------------------------------------------------------------------------------------


async def test_all_rows_are_failed_wherever_they_are(mock_clock, floor):
    lost, left = floor.use(ScriptedDevice(), ScriptedDevice())
    suspects = await floor.put_on(lost, 16, 16)
    launched = floor.put(*[MAX_TOKENS] * 2)
    await wait_all_tasks_blocked()
    floor.lose(lost)
    waiting = floor.put(*[MAX_TOKENS] * 9)
    planned = floor.put_planned(1)
    await wait_all_tasks_blocked()
    assert left.in_flight
    floor.dispatcher.close()
    rows = suspects + launched + waiting + planned
    assert {type(row.error) for row in rows} == {EngineDeadError}
    assert (len(floor.queue), len(floor.dispatcher.in_flight), len(floor.queue.planned)) == (0, 0, 0)


# -- delivery -------------------------------------------------------------------------------------------


def entry_of(settled: Settled, number: int = 0) -> QueueEntry:
    return QueueEntry(PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32))), settled, number=number)


class Submitter:
    def __init__(self) -> None:
        self.deliveries: list[list[int]] = []

    def settled(self, entries: list[QueueEntry]) -> None:
        assert all(entry.is_settled for entry in entries)
        self.deliveries.append([entry.number for entry in entries])


async def test_rows_of_one_submitter_are_delivered_together_wherever_they_are_in_the_batch():
    first, second = Submitter(), Submitter()
    entries = [entry_of((first, second)[number % 2].settled, number) for number in range(10)]
    in_flight = InFlightBatch(entries)
    in_flight.forward_s, in_flight.copy_s = 0.25, 0.5
    await in_flight.deliver([(np.full(1, number),) for number in range(10)])
    assert first.deliveries == [[0, 2, 4, 6, 8]]
    assert second.deliveries == [[1, 3, 5, 7, 9]]
    for number, each in enumerate(entries):
        assert each.output is not None
        assert each.output.values[0] == number
        assert (each.output.forward_s, each.output.copy_s) == (0.25, 0.5)
        assert each.output.queue_s == in_flight.launched - each.queued_at


async def test_a_submitter_is_not_given_more_rows_at_once_than_the_limit():
    one, other = Submitter(), Submitter()
    rows = [entry_of(one.settled, number) for number in range(2 * MAX_DELIVERED_ROWS + 1)]
    output = PoolingOutput((), 0.0, 0.0, 0.0)
    await deliver([(row, output) for row in [*rows, entry_of(other.settled)]])
    assert [len(each) for each in one.deliveries] == [MAX_DELIVERED_ROWS, MAX_DELIVERED_ROWS, 1]
    assert [number for each in one.deliveries for number in each] == [row.number for row in rows]
    assert other.deliveries == [[0]]

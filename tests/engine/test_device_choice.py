"""Which device gets the next batch, and which one is left free of long rows."""

from collections import Counter

import pytest
from trio.testing import wait_all_tasks_blocked

from tests.engine.scripted_devices import MAX_TOKENS, ScriptedDevice, warm_up
from trio_pool_serve.engine.device_choice import OTHER_ZONE_S
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS


@pytest.mark.parametrize("depth", [1, 2])
async def test_under_saturation_each_device_computes_as_it_is_fast(mock_clock, floor, depth):
    devices = floor.use(*[ScriptedDevice(speed * 1e-4, credits=depth) for speed in (1, 2, 4)])
    await warm_up(floor)
    floor.put(*[256] * 1000)
    await floor.pass_time(10.0)
    assert len(floor.queue) > 0
    busy_s = [sum(map(device.seconds, device.batches)) for device in devices]
    assert busy_s == pytest.approx([10.0] * 3, rel=0.1)


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
    fast.stall_reason = "stalled"
    rows = floor.put(64, 64)
    planned = floor.put_planned(1)
    await floor.pass_time(10.0)
    assert {entry.output.device for entry in rows + planned} == {slow}
    assert fast.rows == [1] * ahead


async def test_a_device_in_another_zone_gets_only_what_has_waited(mock_clock, floor):
    here, there = floor.use(ScriptedDevice(zone="here"), ScriptedDevice(1e-5, zone="there"))
    floor.dispatcher.zone = "here"
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


@pytest.mark.parametrize("own", [[], ["stalled"]])
async def test_without_an_available_device_in_the_own_zone_others_get_rows_at_once(mock_clock, floor, own):
    floor.use(*[ScriptedDevice(zone="here", stall_reason=each) for each in own], ScriptedDevice(zone="there"))
    floor.dispatcher.zone = "here"
    floor.put(64)
    await wait_all_tasks_blocked()
    assert floor.devices[-1].rows == [1]


# -- long rows ------------------------------------------------------------------------------------------


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

"""When devices get batches, and how rows are settled: devices with set times, in a clock that the test moves."""

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.scripted_devices import MAX_TOKENS, ScriptedDevice
from trio_pool_serve.engine.device import MAX_DELIVERED_ROWS, InFlightBatch, deliver
from trio_pool_serve.engine.dispatcher import ARRIVAL_ROUNDS
from trio_pool_serve.engine.queue_entry import QueueEntry, Settled
from trio_pool_serve.errors import EngineDeadError
from trio_pool_serve.types import PoolingOutput, PoolingRequest, RenderedPrompt


async def test_rows_of_requests_that_have_arrived_are_computed_together(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice(overhead_s=600.0, credits=1))
    for tokens in (16, 512):  # two sizes show how much of a pass is constant
        floor.put(tokens)
        await floor.pass_time(1000.0)
    for _ in range(ARRIVAL_ROUNDS):
        floor.put(16)
        await trio.lowlevel.checkpoint()
    await wait_all_tasks_blocked()
    floor.put(16)  # there is no room any more
    await wait_all_tasks_blocked()
    assert device.rows == [1, 1, 4]


async def test_no_row_waits_for_others_if_nothing_shows_that_a_pass_less_saves_time(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice(credits=1))
    for _ in range(2):
        floor.put(16)
        await floor.pass_time(1.0)
    floor.put(16)
    for _ in range(2):  # the dispatcher runs once in each
        await trio.lowlevel.checkpoint()
    floor.put(16)
    await wait_all_tasks_blocked()
    assert device.rows == [1, 1, 1]


async def test_time_in_which_two_batches_are_in_flight_counts_once_and_idle_time_does_not(mock_clock, floor):
    (device,) = floor.use(ScriptedDevice())
    await floor.pass_time(1.0)
    floor.put(MAX_TOKENS, MAX_TOKENS)
    await wait_all_tasks_blocked()
    assert len(device.in_flight) == 2
    await floor.pass_time(10.0)
    assert floor.dispatcher.busy._value.get() == pytest.approx(sum(map(device.seconds, device.batches)))


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

"""Rows of lost devices: computed again alone, or refused."""

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.engine.scripted_devices import ScriptedDevice
from trio_pool_serve.engine.lost_rows import REFUSAL, REFUSED_S
from trio_pool_serve.errors import DeadlineExceededError, EngineProcessDiedError
from trio_pool_serve.types import ImageFeatures, RenderedPrompt


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
    leaving.stall_reason = "stalled"
    (entry,) = await floor.put_on(lost, 16)
    floor.lose(lost)
    await floor.pass_time(1.0)
    assert (leaving.rows, left.rows, entry.losses) == ([], [1], 1)


async def test_a_row_that_two_devices_were_lost_with_is_refused_for_minutes(mock_clock, floor):
    first, second, third = floor.use(*[ScriptedDevice() for _ in range(3)])
    (row,) = await floor.put_on(first, 16)
    third.stall_reason = "stalled"
    floor.lose(first)
    await wait_all_tasks_blocked()
    third.stall_reason = ""
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
    left.stall_reason = "stalled"
    in_time, late, abandoned = floor.put(16, 16, 16)
    late.request = replace(late.request, deadline=trio.current_time() + 1)
    (planned,) = floor.put_planned(1)
    await wait_all_tasks_blocked()
    assert [len(batch.entries) for batch in lost.in_flight] == [3, 1]
    floor.clock.jump(2)
    left.stall_reason = ""
    abandoned.is_abandoned = True
    floor.lose(lost)
    assert isinstance(planned.error, EngineProcessDiedError)
    await floor.pass_time(1.0)
    assert isinstance(late.error, DeadlineExceededError)
    assert in_time.output is not None
    assert not abandoned.is_settled
    assert left.rows == [1]

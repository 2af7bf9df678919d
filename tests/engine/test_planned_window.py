"""The batches of a window depend on the rows of the window alone."""

import random

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.engine.test_local import engine_over, running
from tests.engine.windows import Members, compute_window
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.planned_window import PlannedWindow, planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import BatchFailedError, EngineLoadingError, EngineProcessDiedError
from trio_pool_serve.types import ImageFeatures, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

NO_TOKENS = np.zeros(0, dtype=np.int32)


def row(tokens: int, first: int = 1) -> PoolingRequest:
    ids = np.full(tokens, 1, dtype=np.int32)
    ids[0] = first
    return PoolingRequest(RenderedPrompt(ids))


def shapes(runner: ScriptedRunner) -> list[list[tuple[int, int]]]:
    """Return length and first id of the rows of each batch."""
    return [
        [(request.tokens, int(request.prompt.token_ids[0])) for request in batch.requests] for batch in runner.batches
    ]


async def test_batches_are_the_same_in_whatever_order_members_submit_and_whatever_else_waits(scripted):
    rng = random.Random(3)
    members = [[row(rng.randint(1, 30), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))] for _ in range(12)]
    lengths = [[each.tokens for each in of_member] for of_member in members]
    async with running(engine_over(lambda: scripted)) as engine:
        assert await compute_window(engine, *members, order=range(12)) == lengths
        alone = shapes(scripted)
        scripted.batches.clear()
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(engine.submit, row(7, first=1000))
            assert await compute_window(engine, *members, order=rng.sample(range(12), 12)) == lengths
        beside_others = shapes(scripted)
    assert len(alone) > 3
    assert [batch for batch in beside_others if batch[0][1] != 1000] == alone


async def test_rows_wait_for_every_member_that_may_still_submit(scripted):
    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        members = Members(engine, 3)
        nursery.start_soon(members.submit, 0, row(3))
        nursery.start_soon(members.submit, 1, row(3))
        await wait_all_tasks_blocked()
        assert members.outcomes == {}
        with members.window.members[2]:
            """A member that has nothing to compute."""
        await wait_all_tasks_blocked(0.01)
    assert members.outcomes == {0: [3], 1: [3]}
    assert len(scripted.batches) == 1


async def test_a_row_that_is_refused_is_in_no_batch_and_keeps_no_other_waiting(scripted):
    async with running(engine_over(lambda: scripted)) as engine:
        engine.dispatcher.refused.refuse(QueueEntry(row(3, first=7)))
        with trio.fail_after(10):
            refused, computed = await compute_window(engine, [row(3, first=7)], [row(4)])
    assert isinstance(refused, EngineProcessDiedError)
    assert computed == [4]
    assert shapes(scripted) == [[(4, 1)]]


async def test_second_stages_are_planned_together_too(scripted):
    window = PlannedWindow(2)

    async def submit(index: int) -> None:
        with window.members[index] as member:
            await member.submit_all(engine, [row(3 + index)])
            await member.submit_all(engine, [row(5 + index)])

    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        for index in range(2):
            nursery.start_soon(submit, index)
    assert [[tokens for tokens, _ in batch] for batch in shapes(scripted)] == [[4, 3], [6, 5]]


async def test_a_cancelled_member_lets_the_others_go_on(scripted):
    """Cancellation: at once, and the rows of the other members do not wait for it."""
    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        members = Members(engine, 3)
        nursery.start_soon(members.submit_cancellable, 0, row(3))
        nursery.start_soon(members.submit, 1, row(3))
        await wait_all_tasks_blocked()
        members.scope.cancel()
        await wait_all_tasks_blocked()
        nursery.start_soon(members.submit, 2, row(3))
    assert members.outcomes == {1: [3], 2: [3]}
    assert [len(batch.requests) for batch in scripted.batches] == [2]


@pytest.mark.usefixtures("one_in_flight")
async def test_a_member_cancelled_after_planning_leaves_the_batch_as_it_is(scripted):
    async with running(engine_over(lambda: scripted)) as engine:
        members = Members(engine, 2)
        scripted.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit, row(9))  # keeps the device busy
            await wait_all_tasks_blocked()
            nursery.start_soon(members.submit_cancellable, 0, row(3))
            nursery.start_soon(members.submit, 1, row(4))
            await wait_all_tasks_blocked()
            members.scope.cancel()
            await wait_all_tasks_blocked()
            scripted.gate.set()
    assert [[tokens for tokens, _ in batch] for batch in shapes(scripted)][1:] == [[4, 3]]


async def test_rows_with_images_do_not_wait_for_the_others(scripted):
    """They hold memory until they are computed, which other members may need to go on."""
    image = ImageFeatures({"pixel_values": np.zeros((1, 3), np.float32)}, (2,))
    async with running(engine_over(lambda: scripted)) as engine:
        members = Members(engine, 2)
        await members.submit(0, PoolingRequest(RenderedPrompt(np.ones(2, dtype=np.int32), images=image)))
        with members.window.members[1]:
            assert len(scripted.batches) == 1


async def test_a_row_without_tokens_fails_alone(scripted):
    async with running(engine_over(lambda: scripted)) as engine:
        failed, computed = await compute_window(engine, [replace(row(1), prompt=RenderedPrompt(NO_TOKENS))], [row(3)])
    assert isinstance(failed, BatchFailedError)
    assert "has no tokens" in str(failed)
    assert computed == [3]


async def test_what_the_engine_raises_is_the_error_of_all_rows(scripted):
    engine = engine_over(lambda: scripted)  # not loaded
    assert [type(each) for each in await compute_window(engine, [row(3)], [row(3)])] == [EngineLoadingError] * 2


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 256))
def test_every_row_is_in_one_batch_within_the_budget_and_little_is_padding(lengths, max_tokens):
    entries = [QueueEntry(row(tokens)) for tokens in lengths]
    batches = list(planned(entries, max_tokens))
    assert sorted(map(id, entries)) == sorted(id(each) for batch in batches for each in batch)
    for batch in batches:
        tokens = [each.request.tokens for each in batch]
        padded = max(tokens) * len(tokens)
        assert padded <= max_tokens or len(batch) == 1
        assert padded - sum(tokens) <= max(max_tokens // 64, 0.1 * padded)

"""The batches of a window depend on the rows of the window alone."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.engine.test_local import engine_over, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.planned_window import PlannedWindow, planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import BatchFailedError, EngineLoadingError, EngineProcessDiedError
from trio_pool_serve.types import ImageFeatures, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def row(tokens: int, first: int = 1) -> PoolingRequest:
    ids = np.full(tokens, 1, dtype=np.int32)
    ids[0] = first
    return PoolingRequest(RenderedPrompt(ids))


def shapes(runner: ScriptedRunner) -> list[list[tuple[int, int]]]:
    """Return length and first id of the rows of each batch."""
    return [
        [(request.tokens, int(request.prompt.token_ids[0])) for request in batch.requests] for batch in runner.batches
    ]


async def compute_window(engine: Engine, of_members: Sequence[Sequence[PoolingRequest]], order: Sequence[int]) -> None:
    """Have the members submit their rows, in an order."""
    window = PlannedWindow(len(of_members))

    async def submit(index: int) -> None:
        with window.members[index] as member:
            outputs = await member.submit_all(engine, of_members[index])
            assert [output.values[0][0] for output in outputs] == [each.tokens for each in of_members[index]]

    async with trio.open_nursery() as nursery:
        for index in order:
            nursery.start_soon(submit, index)
            await wait_all_tasks_blocked()


async def test_batches_are_the_same_in_whatever_order_members_submit_and_whatever_else_waits(scripted):
    rng = random.Random(3)
    members = [[row(rng.randint(1, 30), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))] for _ in range(12)]
    async with running(engine_over(lambda: scripted)) as engine:
        await compute_window(engine, members, range(12))
        alone = shapes(scripted)
        scripted.batches.clear()
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(engine.submit, row(7, first=1000))
            await compute_window(engine, members, rng.sample(range(12), 12))
        beside_others = shapes(scripted)
    assert len(alone) > 3
    assert [batch for batch in beside_others if batch[0][1] != 1000] == alone


async def test_rows_wait_for_every_member_that_may_still_submit(scripted):
    window = PlannedWindow(3)
    computed: list[int] = []

    async def submit(index: int) -> None:
        with window.members[index] as member:
            await member.submit_all(engine, [row(3)])
            computed.append(index)

    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(submit, 0)
        nursery.start_soon(submit, 1)
        await wait_all_tasks_blocked()
        assert computed == []
        with window.members[2]:
            """A member that has nothing to compute."""
        await wait_all_tasks_blocked(0.01)
    assert sorted(computed) == [0, 1]
    assert len(scripted.batches) == 1


async def test_a_row_that_is_refused_is_in_no_batch_and_keeps_no_other_waiting(scripted):
    window = PlannedWindow(2)

    async def submit_refused() -> None:
        with window.members[0] as member, pytest.raises(EngineProcessDiedError):
            await member.submit_all(engine, [row(3, first=7)])

    async with running(engine_over(lambda: scripted)) as engine:
        engine.dispatcher.refused.refuse(QueueEntry(row(3, first=7)))
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(submit_refused)
                with window.members[1] as member:
                    await member.submit_all(engine, [row(4)])
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
    window = PlannedWindow(3)
    scope = trio.CancelScope()
    computed: list[int] = []

    async def submit(index: int) -> None:
        with window.members[index] as member:
            await member.submit_all(engine, [row(3)])
            computed.append(index)

    async def submit_cancelled() -> None:
        with scope:
            await submit(0)

    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(submit_cancelled)
        nursery.start_soon(submit, 1)
        await wait_all_tasks_blocked()
        scope.cancel()
        await wait_all_tasks_blocked()
        nursery.start_soon(submit, 2)
    assert sorted(computed) == [1, 2]
    assert [len(batch.requests) for batch in scripted.batches] == [2]


@pytest.mark.usefixtures("one_in_flight")
async def test_a_member_cancelled_after_planning_leaves_the_batch_as_it_is(scripted):
    window = PlannedWindow(2)
    scope = trio.CancelScope()
    scripted.gate.clear()

    async def submit(index: int) -> None:
        with window.members[index] as member:
            await member.submit_all(engine, [row(3 + index)])

    async def submit_cancelled() -> None:
        with scope:
            await submit(0)

    async with trio.open_nursery() as outer:
        engine = engine_over(lambda: scripted)
        scripted.gate.set()
        await outer.start(engine.run)
        await engine.wait_ready()
        scripted.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit, row(9))  # keeps the device busy
            await wait_all_tasks_blocked()
            nursery.start_soon(submit_cancelled)
            nursery.start_soon(submit, 1)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            scripted.gate.set()
        outer.cancel_scope.cancel()
    assert [[tokens for tokens, _ in batch] for batch in shapes(scripted)][1:] == [[4, 3]]


async def test_rows_with_images_do_not_wait_for_the_others(scripted):
    """They hold memory until they are computed, which other members may need to go on."""
    window = PlannedWindow(2)
    image = ImageFeatures({"pixel_values": np.zeros((1, 3), np.float32)}, (2,))
    with_image = PoolingRequest(RenderedPrompt(np.ones(2, dtype=np.int32), images=image))
    async with running(engine_over(lambda: scripted)) as engine:
        with window.members[0] as member:
            await member.submit_all(engine, [with_image])
        with window.members[1]:
            assert len(scripted.batches) == 1


async def test_a_row_without_tokens_fails_alone(scripted):
    window = PlannedWindow(2)
    empty = PoolingRequest(RenderedPrompt(np.zeros(0, dtype=np.int32)))
    computed: list[int] = []

    async def submit(index: int, request: PoolingRequest) -> None:
        with window.members[index] as member:
            await member.submit_all(engine, [request])
            computed.append(index)

    async def submit_empty() -> None:
        with pytest.raises(BatchFailedError, match="has no tokens"):
            await submit(0, empty)

    async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(submit_empty)
        nursery.start_soon(submit, 1, row(3))
    assert computed == [1]


async def test_what_the_engine_raises_is_the_error_of_all_rows(scripted):
    window = PlannedWindow(2)
    engine = engine_over(lambda: scripted)  # not loaded

    async def submit(index: int) -> None:
        with window.members[index] as member, pytest.raises(EngineLoadingError):
            await member.submit_all(engine, [row(3)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(submit, 0)
        nursery.start_soon(submit, 1)


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

"""The batches of a window depend on the rows of the window alone, and are computed beside other rows."""

import random
import threading

import numpy as np
import pytest
import trio
from attrs import Factory, define, field
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import Members, compute_window, engine_over, first_ids, in_thread, row, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import computing_config
from trio_pool_serve.engine.planned_window import PlannedWindow, planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import EngineDeadError, EngineLoadingError, EngineProcessDiedError
from trio_pool_serve.types import Batch, ImageFeatures, PooledBatch, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def shapes(runner: ScriptedRunner) -> list[list[tuple[int, int]]]:
    """Return length and first id of the rows of each batch."""
    return [[*zip(batch.lengths, first_ids(batch), strict=True)] for batch in runner.batches]


async def test_batches_are_the_same_in_whatever_order_members_submit_and_whatever_else_waits(scripted):
    rng = random.Random(3)
    members = [[row(rng.randint(1, 30), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))] for _ in range(12)]
    lengths = [[each.tokens for each in of_member] for of_member in members]
    async with running(engine_over(scripted)) as engine:
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
    async with running(engine_over(scripted)) as engine, trio.open_nursery() as nursery:
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
    async with running(engine_over(scripted)) as engine:
        engine.queue.dispatcher.lost.refuse(QueueEntry(row(3, first=7)))
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

    async with running(engine_over(scripted)) as engine, trio.open_nursery() as nursery:
        for index in range(2):
            nursery.start_soon(submit, index)
    assert [[tokens for tokens, _ in batch] for batch in shapes(scripted)] == [[4, 3], [6, 5]]


async def test_a_cancelled_member_lets_the_others_go_on(scripted):
    """Cancellation: at once, and the rows of the other members do not wait for it."""
    async with running(engine_over(scripted)) as engine, trio.open_nursery() as nursery:
        members = Members(engine, 3)
        nursery.start_soon(members.submit, 0, row(3))
        nursery.start_soon(members.submit, 1, row(3))
        await wait_all_tasks_blocked()
        members.scopes[0].cancel()
        await wait_all_tasks_blocked()
        nursery.start_soon(members.submit, 2, row(3))
    assert members.outcomes == {1: [3], 2: [3]}
    assert [len(batch.requests) for batch in scripted.batches] == [2]


@pytest.mark.usefixtures("one_in_flight")
async def test_a_member_cancelled_after_planning_leaves_the_batch_as_it_is(scripted):
    async with running(engine_over(scripted)) as engine:
        members = Members(engine, 2)
        scripted.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit, row(9))  # keeps the device busy
            await wait_all_tasks_blocked()
            nursery.start_soon(members.submit, 0, row(3))
            nursery.start_soon(members.submit, 1, row(4))
            await wait_all_tasks_blocked()
            members.scopes[0].cancel()
            await wait_all_tasks_blocked()
            scripted.gate.set()
    assert [[tokens for tokens, _ in batch] for batch in shapes(scripted)][1:] == [[4, 3]]


async def test_rows_with_images_do_not_wait_for_the_others(scripted):
    """They hold memory until they are computed, which other members may need to go on."""
    image = ImageFeatures({"pixel_values": np.zeros((1, 3), np.float32)}, (2,))
    async with running(engine_over(scripted)) as engine:
        members = Members(engine, 2)
        await members.submit(0, PoolingRequest(RenderedPrompt(np.ones(2, dtype=np.int32), images=image)))
        with members.window.members[1]:
            assert len(scripted.batches) == 1


async def test_what_the_engine_raises_is_the_error_of_all_rows(scripted):
    engine = engine_over(scripted)  # not loaded
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


# -- on a runner that computes planned batches at idle priority, for however long that takes -----------


@define(eq=False)
class HeldUp:
    """Has planned batches wait until they are let go, as they do while others keep the cores busy."""

    launching: threading.Event = field(factory=threading.Event, init=False)
    let_go: threading.Event = field(factory=threading.Event, init=False)
    runner: ScriptedRunner = field(
        default=Factory(lambda self: ScriptedRunner(background_launches=1, on_launch=self), takes_self=True), init=False
    )

    async def wait_launching(self) -> None:
        await in_thread(lambda: self.launching.wait(60))

    def __call__(self, batch: Batch) -> PooledBatch | None:
        if batch.is_planned:
            self.launching.set()
            assert self.let_go.wait(60)
        return None


@pytest.fixture
def held_up() -> HeldUp:
    return HeldUp()


async def test_other_rows_are_computed_while_a_planned_batch_is(held_up):
    async with running(engine_over(held_up.runner)) as engine, trio.open_nursery() as nursery:
        members = Members(engine, 1)
        nursery.start_soon(members.submit, 0, row(3), row(2))
        await held_up.wait_launching()
        assert (await engine.submit(row(5))).values[0][0] == 5
        assert members.outcomes == {}
        assert engine.statistics().in_flight_batches == 1
        held_up.let_go.set()
    assert members.outcomes == {0: [3, 2]}
    assert [len(batch.requests) for batch in held_up.runner.batches[-2:]] == [2, 1]


async def test_only_as_many_planned_batches_as_the_runner_takes_are_computed_at_a_time(held_up):
    async with running(engine_over(held_up.runner)) as engine, trio.open_nursery() as nursery:
        before = len(held_up.runner.batches)
        nursery.start_soon(compute_window, engine, [row(40), row(40), row(40)])  # a batch each, by the budget of 64
        await held_up.wait_launching()
        await engine.submit(row(1))
        assert len(held_up.runner.batches) == before + 2
        held_up.let_go.set()
    assert len(held_up.runner.batches) == before + 4


async def test_a_planned_batch_that_takes_long_is_neither_a_stall_nor_a_hang(held_up, mock_clock, monkeypatch):
    monkeypatch.setattr(computing_config, "STALL_SHARE", 1e-10)
    engine = engine_over(held_up.runner, batch_timeout_s=5.0)
    async with running(engine), trio.open_nursery() as nursery:
        nursery.start_soon(compute_window, engine, [row(3)])
        await held_up.wait_launching()
        mock_clock.jump(1000)
        assert (await engine.submit(row(5))).values[0][0] == 5
        assert (engine.state, engine.statistics().oldest_in_flight_s) == ("ready", 0.0)
        held_up.let_go.set()


async def test_how_long_planned_batches_take_is_not_expected_of_others(held_up):
    held_up.let_go.set()
    async with running(engine_over(held_up.runner)) as engine:
        known = engine.statistics().tokens_per_s
        for _ in range(20):
            await compute_window(engine, [row(3), row(2)])
        assert engine.statistics().tokens_per_s == known
        assert engine.statistics().batches >= 20


async def test_an_engine_that_is_cancelled_does_not_wait_for_planned_batches(held_up):
    async with trio.open_nursery() as nursery:
        async with running(engine_over(held_up.runner)) as engine:
            members = Members(engine, 1)
            nursery.start_soon(members.submit, 0, row(3))
            await held_up.wait_launching()
        held_up.let_go.set()
    assert isinstance(members.outcomes[0], EngineDeadError)


async def test_a_planned_batch_that_fails_is_computed_again_in_parts(held_up):
    def fail_together(batch: Batch) -> None:
        if batch.is_planned and len(batch.requests) > 1:
            raise ValueError("too many")

    held_up.runner.on_launch = fail_together
    async with running(engine_over(held_up.runner)) as engine:
        assert await compute_window(engine, [row(3), row(2)]) == [[3, 2]]

"""Planned batches on a runner that computes them at idle priority: beside other rows, for however long that takes."""

import threading

import numpy as np
import pytest
import trio
from attrs import define, field

from tests.engine.test_local import engine_over, in_thread, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import computing_config
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.errors import EngineDeadError
from trio_pool_serve.types import Batch, PooledBatch, PoolingOutput, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def row(tokens: int) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.ones(tokens, dtype=np.int32)))


@define(eq=False)
class HeldUp:
    """Has planned batches wait until they are let go, as they do while others keep the cores busy."""

    launching: threading.Event = field(factory=threading.Event, init=False)
    let_go: threading.Event = field(factory=threading.Event, init=False)

    def __call__(self, batch: Batch) -> PooledBatch | None:
        if batch.is_planned:
            self.launching.set()
            assert self.let_go.wait(60)
        return None


@pytest.fixture
def held_up() -> HeldUp:
    return HeldUp()


@pytest.fixture
def runner(held_up: HeldUp) -> ScriptedRunner:
    return ScriptedRunner(background_launches=1, on_launch=held_up)


async def submit_window(engine, rows: list[PoolingRequest]) -> list[PoolingOutput]:
    with PlannedWindow(1).members[0] as member:
        return await member.submit_all(engine, rows)


async def test_other_rows_are_computed_while_a_planned_batch_is(runner: ScriptedRunner, held_up: HeldUp):
    async with running(engine_over(lambda: runner)) as engine, trio.open_nursery() as nursery:
        outputs: list[PoolingOutput] = []

        async def submit() -> None:
            outputs.extend(await submit_window(engine, [row(3), row(2)]))

        nursery.start_soon(submit)
        await in_thread(lambda: held_up.launching.wait(60))
        assert (await engine.submit(row(5))).values[0][0] == 5
        assert outputs == []
        assert engine.statistics().in_flight_batches == 1
        held_up.let_go.set()
    assert [output.values[0][0] for output in outputs] == [3, 2]
    assert [len(batch.requests) for batch in runner.batches[-2:]] == [2, 1]


async def test_only_as_many_planned_batches_as_the_runner_takes_are_computed_at_a_time(
    runner: ScriptedRunner, held_up: HeldUp
):
    async with running(engine_over(lambda: runner)) as engine, trio.open_nursery() as nursery:
        before = len(runner.batches)
        nursery.start_soon(submit_window, engine, [row(40), row(40), row(40)])  # a batch each, by the budget of 64
        await in_thread(lambda: held_up.launching.wait(60))
        await engine.submit(row(1))
        assert len(runner.batches) == before + 2
        held_up.let_go.set()
    assert len(runner.batches) == before + 4


async def test_other_rows_do_not_wake_those_that_take_planned_batches(
    runner: ScriptedRunner, held_up: HeldUp, monkeypatch: pytest.MonkeyPatch
):
    held_up.let_go.set()
    looked: list[str] = []
    take = Dispatcher._take
    monkeypatch.setattr(
        Dispatcher, "_take", lambda self, devices: looked.append(devices[0].kind) or take(self, devices)
    )
    async with running(engine_over(lambda: runner)) as engine:
        await engine.submit(row(5))
        looked.clear()
        for _ in range(10):
            await engine.submit(row(5))
        assert {*looked} == {"launch"}
        await submit_window(engine, [row(3)])
        assert "background" in looked


async def test_a_planned_batch_that_takes_long_is_neither_a_stall_nor_a_hang(
    runner: ScriptedRunner, held_up: HeldUp, mock_clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(computing_config, "STALL_SHARE", 1e-10)
    engine = engine_over(lambda: runner, batch_timeout_s=5.0)
    async with running(engine), trio.open_nursery() as nursery:
        nursery.start_soon(submit_window, engine, [row(3)])
        await in_thread(lambda: held_up.launching.wait(60))
        mock_clock.jump(1000)
        assert (await engine.submit(row(5))).values[0][0] == 5
        assert (engine.state, engine.statistics().oldest_in_flight_s) == ("ready", 0.0)
        held_up.let_go.set()


async def test_how_long_planned_batches_take_is_not_expected_of_others(runner: ScriptedRunner, held_up: HeldUp):
    held_up.let_go.set()
    async with running(engine_over(lambda: runner)) as engine:
        known = engine.statistics().tokens_per_s
        for _ in range(20):
            await submit_window(engine, [row(3), row(2)])
        assert engine.statistics().tokens_per_s == known
        assert engine.statistics().batches >= 20


async def test_an_engine_that_is_cancelled_does_not_wait_for_planned_batches(runner: ScriptedRunner, held_up: HeldUp):
    errors: list[Exception] = []

    async def submit(engine) -> None:
        try:
            await submit_window(engine, [row(3)])
        except EngineDeadError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        async with running(engine_over(lambda: runner)) as engine:
            nursery.start_soon(submit, engine)
            await in_thread(lambda: held_up.launching.wait(60))
        held_up.let_go.set()
    assert len(errors) == 1


async def test_a_planned_batch_that_fails_is_computed_again_in_parts(runner: ScriptedRunner, held_up: HeldUp):
    def fail_together(batch: Batch) -> None:
        if batch.is_planned and len(batch.requests) > 1:
            raise ValueError("too many")

    runner.on_launch = fail_together
    async with running(engine_over(lambda: runner)) as engine:
        outputs = await submit_window(engine, [row(3), row(2)])
    assert [output.values[0][0] for output in outputs] == [3, 2]

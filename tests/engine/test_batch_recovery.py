"""A batch that fails: who gets the error, who is answered, and how much it may cost; over a scripted runner."""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import Outcomes, computing, engine_over, first_ids, in_thread, request, running
from tests.models.model_families import load, write_family
from tests.scripted_runner import ScriptedRunner, scripted_vector
from tests.server.server_process import until
from trio_pool_serve.engine import local_device
from trio_pool_serve.engine.batch_recovery import MAX_PASSES, BatchRecovery, Fault
from trio_pool_serve.engine.batching import GROW_AFTER
from trio_pool_serve.engine.device import RowValues
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, OutOfDeviceMemoryError
from trio_pool_serve.types import Batch, PooledBatch, PoolingOutput

ALWAYS = 13
"""A row with this id fails every batch that it is in."""


def fail_on_poison(batch: Batch) -> None:
    if ALWAYS in first_ids(batch):
        raise ValueError("poison")


async def computed_together(engine: Engine, runner: ScriptedRunner, ids: Iterable[int]) -> Outcomes:
    """Submit rows, each by a client of its own, so that all are in one batch; return what became of them."""
    outcomes = Outcomes()
    async with computing(engine, runner) as nursery:
        for number, token in enumerate(ids):
            nursery.start_soon(outcomes.submit, engine, number, request(token, number))
        await wait_all_tasks_blocked()
    return outcomes


@asynccontextmanager
async def serial(runner: ScriptedRunner, **settings) -> AsyncIterator[Engine]:
    runner.default_batch_tokens = settings.pop("tokens", 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_device, "MAX_IN_FLIGHT", 1)
        async with running(engine_over(runner, **settings)) as engine:
            yield engine


@pytest.mark.parametrize("place", [0, 1, 31, 62, 63])
async def test_only_the_guilty_row_fails_and_costs_a_few_passes(scripted, caplog, place):
    scripted.on_launch = fail_on_poison
    async with serial(scripted) as engine:
        outcomes = await computed_together(engine, scripted, [ALWAYS if n == place else 2 for n in range(64)])
        assert list(outcomes.failed) == [place]
        assert type(outcomes.failed[place]) is BatchFailedError
        assert "poison" not in str(outcomes.failed[place]), "no internals"
        assert "poison" in caplog.text
        for number, output in outcomes.answered.items():
            np.testing.assert_array_equal(output.values[0], scripted_vector(np.array([2, number]), 8))
        assert scripted.rows[:2] == [1, 64]
        failing = [len(batch.requests) for batch in scripted.batches if ALWAYS in first_ids(batch)]
        assert failing == [64, 32, 16, 8, 4, 2, 1], "each half once"
        assert sum(scripted.rows[2:]) <= 2 * 64
        assert engine.statistics().failed_batches == 1
        assert engine.statistics().in_flight_batches == 0
        assert engine.state == "ready"


@pytest.mark.parametrize("guilty", [{0, 63}, set(range(8)), set(range(0, 64, 8)), set(range(56, 64)), {5}])
async def test_several_guilty_rows_fail_alone_wherever_they_are(scripted, guilty):
    scripted.on_launch = fail_on_poison
    async with serial(scripted) as engine:
        outcomes = await computed_together(engine, scripted, [ALWAYS if n in guilty else 2 for n in range(64)])
    assert set(outcomes.failed) == guilty
    assert set(outcomes.answered) == set(range(64)) - guilty


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 333])
async def test_a_broken_model_costs_a_bounded_number_of_passes(scripted, rows):
    def fail(batch: Batch) -> None:
        if first_ids(batch) != [1]:
            raise ValueError("broken")

    scripted.on_launch = fail
    async with serial(scripted) as engine:
        outcomes = await computed_together(engine, scripted, [2] * rows)
        assert len(outcomes.failed) == rows
        assert {type(error) for error in outcomes.failed.values()} == {BatchFailedError}
        assert len(scripted.batches) - 2 <= 4 * (rows - 1).bit_length() + 2
        assert (await engine.submit(request(1))).values


async def test_rows_are_not_computed_again_once_that_has_taken_too_long(scripted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_device, "RETRY_S", 0)
    scripted.on_launch = fail_on_poison
    async with serial(scripted) as engine:
        outcomes = await computed_together(engine, scripted, [2, ALWAYS, 2])
    assert len(outcomes.failed) == 3
    assert scripted.rows == [1, 3]


def forget_one(batch: Batch) -> int:
    """Return how many rows the copy has: one is missing, unless it is the only one."""
    return max(1, len(batch.requests) - 1)


@pytest.mark.parametrize(("copied", "failed"), [(fail_on_poison, [2]), (forget_one, [])], ids=["raises", "too few"])
async def test_an_error_of_the_copy_or_too_few_outputs_are_treated_as_an_error_of_the_launch(scripted, copied, failed):
    async def copy(batch: Batch) -> RowValues:
        await trio.lowlevel.checkpoint()
        count = copied(batch)
        return [(scripted_vector(row.prompt.token_ids, 8),) for row in batch.requests][:count]

    scripted.on_launch = copy
    async with serial(scripted) as engine:
        outcomes = await computed_together(engine, scripted, [2, 2, ALWAYS, 2])
    assert list(outcomes.failed) == failed


# -- its bounds ----------------------------------------------------------------------------------------


def entries(count: int) -> list[QueueEntry]:
    return [QueueEntry(request(2, number)) for number in range(count)]


async def test_the_number_of_passes_is_bounded_even_if_some_succeed():
    passes = Counter[bool]()

    async def compute(rows: list[QueueEntry]) -> Fault | None:
        failed = any(row.request.prompt.token_ids[1] % 2 for row in rows)
        passes[failed] += 1
        if failed:
            return Fault.RAISED
        for row in rows:
            row.output = PoolingOutput((), 0, 0, 0)
        return None

    rows = entries(1024)
    recovery = BatchRecovery(compute, time_limit_s=1000)
    await recovery.run(rows, Fault.RAISED)
    assert passes.total() == recovery.passes <= MAX_PASSES
    assert all(row.is_settled for row in rows)
    assert recovery.failed_rows == sum(row.error is not None for row in rows) > 512


# -- clients that have left ----------------------------------------------------------------------------


@pytest.mark.parametrize("staying", [4, 0])
async def test_rows_whose_clients_have_left_are_not_computed_again(scripted, staying):
    begun, leave = threading.Event(), threading.Event()
    passes: list[int] = []

    def fail_first(batch: Batch) -> None:
        if first_ids(batch)[0] != 1:
            passes.append(len(batch.requests))
            if len(passes) == 1:
                begun.set()
                assert leave.wait(60)
                raise ValueError("first")

    scripted.on_launch = fail_first
    outcomes = Outcomes()
    async with serial(scripted) as engine:
        async with computing(engine, scripted) as nursery, trio.open_nursery() as clients:
            for number in range(6):
                clients.start_soon(outcomes.submit, engine, -1 - number, request(3, number))
            for number in range(staying):
                nursery.start_soon(outcomes.submit, engine, number, request(2, number))
            await wait_all_tasks_blocked()
            scripted.gate.set()
            await in_thread(begun.wait)
            clients.cancel_scope.cancel(reason="they leave")
            leave.set()
        await until(lambda: not engine.statistics().in_flight_batches)  # its thread is being left
        assert passes[0] == staying + 6
        assert sum(passes[1:]) == staying
        assert set(outcomes.answered) == set(range(staying))
        assert (await engine.submit(request(1))).values, "its slot is free"


async def test_a_batch_that_nobody_waits_for_any_more_is_not_launched(scripted):
    engine, release = engine_over(scripted), threading.Event()
    async with running(engine), trio.open_nursery() as nursery:
        nursery.start_soon(engine.devices.offload.run, "launch", release.wait)  # another model's batch
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as clients:
            clients.start_soon(engine.submit_all, [request(2), request(3)])
            await wait_all_tasks_blocked()
            assert engine.statistics().in_flight_batches == 1
            clients.cancel_scope.cancel(reason="it leaves")
        release.set()
        await engine.submit(request(4))
        assert [first_ids(batch) for batch in scripted.batches] == [[4]]
        assert engine.statistics().in_flight_batches == 0


# -- others ----------------------------------------------------------------------------------------------


async def test_the_other_launch_thread_goes_on_while_rows_are_computed_again():
    again, go_on = threading.Event(), threading.Event()

    def fail(batch: Batch) -> None:
        if ALWAYS in first_ids(batch):
            if len(batch.requests) == 1:
                again.set()
                assert go_on.wait(60)
            raise ValueError("poison")

    runner = ScriptedRunner(concurrent_launches=2, on_launch=fail)
    engine = engine_over(runner, launches=2)
    outcomes = Outcomes()
    async with running(engine), trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit_all, [request(2), request(3)])
        await in_thread(runner.launching.wait)
        nursery.start_soon(outcomes.submit, engine, 0, request(ALWAYS))
        await in_thread(again.wait)
        for token in range(20, 40):
            assert (await engine.submit(request(token))).values[0][2] == token
        go_on.set()
    assert list(outcomes.failed) == [0]


async def test_a_runner_that_launches_one_batch_at_a_time_is_never_given_two():
    launching = threading.Lock()

    def compute(batch: Batch) -> PooledBatch | None:
        assert launching.acquire(blocking=False), "two at a time"
        try:
            threading.Event().wait(0.001)  # time for another one, were it allowed
            fail_on_poison(batch)
        finally:
            launching.release()
        return None

    runner = ScriptedRunner(on_launch=compute, default_batch_tokens=16)
    engine = engine_over(runner, launches=2)
    outcomes = Outcomes()
    async with running(engine), trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(outcomes.submit, engine, number, request(ALWAYS if number % 20 == 0 else 2, number))
    assert set(outcomes.failed) == set(range(0, 100, 20))


# -- cancelled anywhere ----------------------------------------------------------------------------------

THE_END = 1_000_000
STEPS = [*range(40), *range(40, 400, 20), THE_END]
"""Turns of the event loop before the cancellation; at `THE_END` the recovery is over, however slow its threads are."""


async def turns(step: int, is_over: Callable[[], bool]) -> None:
    """Let `step` turns of the event loop pass, fewer when the recovery is over before that."""
    with trio.fail_after(30):
        for _ in range(step):
            if is_over():
                return
            await trio.lowlevel.checkpoint()


async def test_clients_that_leave_at_any_step_of_a_recovery_leave_nothing_behind(scripted):
    scripted.on_launch = fail_on_poison
    ended = 0
    async with serial(scripted) as engine:
        for step in STEPS:
            rows = [request(ALWAYS if number == 5 else 2, number) for number in range(8)]
            neighbour = Outcomes()
            async with computing(engine, scripted) as nursery:
                nursery.start_soon(neighbour.submit, engine, 0, request(7))
                leaving, left = trio.CancelScope(), trio.Event()

                async def leave(leaving=leaving, left=left, rows=rows) -> None:
                    with leaving, pytest.raises(BatchFailedError):
                        await engine.submit_all(rows)
                    left.set()

                nursery.start_soon(leave)
                await wait_all_tasks_blocked()
                scripted.gate.set()
                await turns(step, left.is_set)
                leaving.cancel(reason=f"step {step}")
            ended += not leaving.cancelled_caught
            assert neighbour.answered[0].values[0][2] == 7
            await until(lambda: not engine.statistics().in_flight_batches)  # a thread that was running finishes
            assert engine.statistics().queued_rows == 0
            assert engine.devices.offload.statistics()["launch"].borrowed == 0
        assert (await engine.submit(request(4))).values
    assert 0 < ended < len(STEPS)


@pytest.mark.usefixtures("one_in_flight")
async def test_ending_the_engine_at_any_step_of_a_recovery_settles_every_row():
    recovered = 0
    for step in STEPS:
        runner = ScriptedRunner(on_launch=fail_on_poison, default_batch_tokens=1000)
        engine = engine_over(runner)
        outcomes = Outcomes()
        async with trio.open_nursery() as clients, running(engine):
            runner.gate.clear()
            clients.start_soon(outcomes.submit, engine, -1, request(1))
            await in_thread(runner.launching.wait)
            for number in range(8):
                clients.start_soon(outcomes.submit, engine, number, request(ALWAYS if number == 5 else 2, number))
            await wait_all_tasks_blocked()
            runner.gate.set()
            await turns(step, lambda outcomes=outcomes: len(outcomes.answered) + len(outcomes.failed) == 9)
        assert len(outcomes.answered) + len(outcomes.failed) == 9
        assert {type(error) for error in outcomes.failed.values()} <= {EngineDeadError, BatchFailedError}
        assert engine.statistics().in_flight_batches == engine.statistics().queued_rows == 0
        recovered += len(outcomes.answered) == 8
    assert 0 < recovered < len(STEPS)


# -- out of memory ---------------------------------------------------------------------------------------


def limited(tokens: Callable[[], int], error: type[Exception]) -> Callable[[Batch], None]:
    def compute(batch: Batch) -> None:
        if batch.padded_tokens > tokens():
            raise error("no memory")

    return compute


@pytest.mark.parametrize("error", [MemoryError, OutOfDeviceMemoryError])
async def test_out_of_memory_makes_batches_smaller_for_a_while(scripted, error, monkeypatch):
    memory, trimmed = [16], threading.Event()
    scripted.on_launch = limited(lambda: memory[0], error)
    scripted.default_batch_tokens = 128
    engine = engine_over(scripted)
    monkeypatch.setattr(local_device, "return_freed_memory", trimmed.set)
    async with running(engine):
        outcomes = await computed_together(engine, scripted, [2] * 64)
        assert len(outcomes.answered) == 64
        assert trimmed.is_set()
        assert engine.statistics().batch_token_budget == 16
        assert engine.devices.metrics.faults["out_of_memory"]._value.get() == 1 + 2 + 4
        begun = len(scripted.batches)
        outcomes = await computed_together(engine, scripted, [2] * 64)
        assert len(outcomes.answered) == 64
        assert max(batch.padded_tokens for batch in scripted.batches[begun:]) <= 20, "within the memory, nearly"
        memory[0] = 1000
        while engine.statistics().batch_token_budget < 128:
            before = engine.statistics().batch_token_budget
            for _ in range(GROW_AFTER):
                await engine.submit(request(*[2] * 128))
            assert engine.statistics().batch_token_budget > before


async def test_a_row_that_does_not_fit_by_itself_fails_alone_and_no_batch_is_smaller_for_it(scripted):
    scripted.on_launch = limited(lambda: 16, MemoryError)
    async with serial(scripted) as engine:
        with pytest.raises(OutOfDeviceMemoryError, match="17 tokens"):
            await engine.submit(request(*[2] * 17))
        assert engine.statistics().batch_token_budget == 1000
        assert (await engine.submit(request(*[2] * 16))).values


# -- a real model ----------------------------------------------------------------------------------------


async def test_an_id_that_a_real_model_does_not_have_fails_its_own_row_only(tmp_path):
    runner = load(write_family(tmp_path / "bert", "bert"))
    engine = engine_over(runner)
    async with running(engine):
        assert engine.statistics().batches == 1, "the probe at the start"
        alone = [(await engine.submit(request(5, number))).values[0] for number in range(1, 17)]
        outcomes = Outcomes()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                token = 10**6 if number == 11 else 5
                nursery.start_soon(outcomes.submit, engine, number, request(token, number + 1))
    assert list(outcomes.failed) == [11]
    assert isinstance(outcomes.failed[11], BatchFailedError)
    assert engine.devices.metrics.faults["retries"]._value.get() > 1, "it had neighbours"
    for number, output in outcomes.answered.items():
        np.testing.assert_allclose(output.values[0], alone[number], atol=1e-5)

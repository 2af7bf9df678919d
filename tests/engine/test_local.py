"""The engine over a scripted runner: the same loop, overlapped and serial."""

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.scripted_runner import ScriptedRunner, scripted_vector
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine import worker
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.compute_rates import MIN_BATCHES
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import (
    BatchFailedError,
    DeadlineExceededError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    OverloadedError,
    RunnerDeadError,
)
from trio_pool_serve.processes.allocator import RETURN_EVERY_S
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, CopiedBatch, Embed, PoolingOutput, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def request(*ids: int, **kwargs) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.array(ids, dtype=np.int32)), **kwargs)


def engine_over(load: Callable[[], ScriptedRunner], launches: int = 1, **settings) -> Engine:
    return Engine(Worker(load, Offload(launch=launches), Metrics().of_engine("m"), SchedulingConfig(**settings)))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.wait_ready()
        yield engine
        nursery.cancel_scope.cancel()


@pytest.fixture(params=[1, 2], ids=["serial", "overlapped"])
async def engine(request, scripted: ScriptedRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr(worker, "MAX_IN_FLIGHT", request.param)
    async with running(engine_over(lambda: scripted)) as ready:
        yield ready


async def in_thread(wait: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(wait, limiter=trio.CapacityLimiter(1))


@asynccontextmanager
async def computing(engine: Engine, runner: ScriptedRunner) -> AsyncIterator[trio.Nursery]:
    """Have a row computed until the block is left; then wait for the tasks of the nursery."""
    runner.gate.clear()
    runner.launching.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit, request(1))
        await in_thread(runner.launching.wait)
        yield nursery
        runner.gate.set()


async def test_freed_memory_is_returned_after_a_while_in_which_there_were_batches(scripted, mock_clock, monkeypatch):
    returned, loop = trio.Semaphore(0), trio.lowlevel.current_trio_token()
    threads: set[threading.Thread] = set()

    def return_memory() -> None:
        threads.add(threading.current_thread())
        loop.run_sync_soon(returned.release)

    monkeypatch.setattr(worker, "return_freed_memory", return_memory)
    async with running(engine_over(lambda: scripted)) as engine:
        await wait_all_tasks_blocked()
        mock_clock.jump(RETURN_EVERY_S)
        await returned.acquire()  # what loading has freed
        await wait_all_tasks_blocked()
        mock_clock.jump(RETURN_EVERY_S)
        await wait_all_tasks_blocked()
        await engine.submit(request(5))
        await wait_all_tasks_blocked()
        assert returned.value == 0
        mock_clock.jump(RETURN_EVERY_S)
        await returned.acquire()
    assert {thread.name for thread in threads} == {"launch"}


async def test_a_row_is_answered_with_its_own_vector_and_times(engine):
    output = await engine.submit(request(5, 6, 7))
    np.testing.assert_array_equal(output.values[0], scripted_vector(np.array([5, 6, 7]), 8))
    assert output.queue_s >= 0
    assert output.forward_s > 0


async def test_every_row_gets_its_own_answer_however_it_was_batched(engine, scripted):
    outputs: dict[int, PoolingOutput] = {}

    async def one(index: int) -> None:
        outputs[index] = await engine.submit(request(*range(1, index % 9 + 2), index))

    async with trio.open_nursery() as nursery:
        for index in range(200):
            nursery.start_soon(one, index)
    for index in range(200):
        assert outputs[index].values[0][3] == index
        assert outputs[index].values[0][0] == index % 9 + 2
    assert sum(scripted.rows) == 200
    assert len(scripted.rows) < 200


async def test_rows_that_arrive_while_the_runner_is_busy_ride_together(engine, scripted):
    async with computing(engine, scripted) as nursery:
        for _ in range(10):
            nursery.start_soon(engine.submit, request(2, 2))
        await wait_all_tasks_blocked()
        assert engine.statistics().queued_rows == 10
    assert scripted.rows == [1, 10]


async def test_a_cancelled_row_that_was_not_launched_never_is(engine, scripted):
    async with computing(engine, scripted):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(engine.submit, request(2))
                inner.start_soon(engine.submit, request(3))
                await wait_all_tasks_blocked()
                assert engine.statistics().queued_tokens == 2
                scope.cancel()
        assert engine.statistics().queued_rows == 0
        assert engine.statistics().queued_tokens == 0
    await engine.submit(request(4))
    assert [row.prompt.token_ids[0] for batch in scripted.batches for row in batch.requests] == [1, 4]


async def test_no_request_is_told_of_rows_that_were_launched_and_then_cancelled(engine, scripted):
    told: list[int] = []

    def row_done(index: int, output: PoolingOutput) -> None:
        told.append(index)

    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit_all, [request(1), request(2)], row_done)
        await in_thread(scripted.launching.wait)
        nursery.cancel_scope.cancel()
    scripted.gate.set()
    await engine.submit_all([request(3)], row_done)
    assert told == [0], "of the second submission alone"


async def test_a_launched_row_that_is_cancelled_is_dropped_and_the_engine_goes_on(engine, scripted):
    scripted.gate.clear()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit, request(1))
            await in_thread(scripted.launching.wait)
            scope.cancel()
    scripted.gate.set()
    assert (await engine.submit(request(9))).values[0][2] == 9


async def test_overlapping_launches_the_next_batch_before_the_last_one_is_copied(scripted, monkeypatch):
    copied = trio.Event()

    class Copying:
        def __init__(self, batch: Batch) -> None:
            self.rows = [scripted_vector(row.prompt.token_ids, 8) for row in batch.requests]

        def __await__(self):
            yield from copied.wait().__await__()
            return self.rows

    scripted.on_launch = Copying
    for in_flight in (1, 2):
        monkeypatch.setattr(worker, "MAX_IN_FLIGHT", in_flight)
        copied = trio.Event()
        scripted.batches.clear()
        async with running(engine_over(lambda: scripted)) as engine, trio.open_nursery() as nursery:
            for token in range(1, 4):
                nursery.start_soon(engine.submit, request(token))
                await wait_all_tasks_blocked(0.05)
            assert len(scripted.batches) == in_flight
            assert engine.statistics().in_flight_batches == in_flight
            copied.set()


async def test_time_in_which_two_batches_are_in_flight_counts_once_and_idle_time_does_not(scripted):
    release, metrics = threading.Event(), Metrics()

    class Copying:
        def __await__(self):
            yield from in_thread(release.wait).__await__()
            return [(np.zeros(8, dtype=np.float32),)]

    def busy_s() -> float:
        return metrics.registry.get_sample_value("trio_pool_serve_busy_seconds_total", {"model": "m"})

    made = Engine(Worker(lambda: scripted, Offload(), metrics.of_engine("m")))
    async with running(made) as engine:
        scripted.on_launch = lambda _: Copying()
        before, began = busy_s(), time.perf_counter()
        async with trio.open_nursery() as nursery:
            for token in (1, 2):
                nursery.start_soon(engine.submit, request(token))
                await wait_all_tasks_blocked(0.05)
            both = time.perf_counter()
            assert engine.statistics().in_flight_batches == 2
            await trio.sleep(0.2)
            held_s = time.perf_counter() - both
            release.set()
        ended = time.perf_counter()
        busy = busy_s() - before
        assert held_s <= busy <= ended - began
        await trio.sleep(0.05)
        assert busy_s() - before == busy


@pytest.mark.parametrize("launch_before", [2, 1], ids=["as at start", "chosen while it was loaded"])
async def test_a_runner_with_two_launch_threads_computes_two_batches_at_a_time(launch_before: int):
    together, offload = threading.Barrier(2), Offload(launch=launch_before)
    runner = ScriptedRunner(concurrent_launches=2, on_launch=lambda batch: together.wait(60) and None)

    def load() -> ScriptedRunner:
        offload.launch = 2
        return runner

    engine = Engine(Worker(load, offload, Metrics().of_engine("m")))
    outputs: dict[int, PoolingOutput] = {}

    async def one(token: int) -> None:
        outputs[token] = await engine.submit(request(token))

    async with running(engine):
        for first in range(1, 21, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, first)
                await in_thread(runner.launching.wait)
                nursery.start_soon(one, first + 1)
            runner.launching.clear()
    assert runner.rows == [1] * 20
    assert {token: output.values[0][3] for token, output in outputs.items()} == {token: token for token in range(1, 21)}
    assert engine.worker.offload.statistics()["launch"].borrowed == 0


async def test_one_of_two_threads_is_left_free_of_long_rows_while_short_ones_arrive():
    gates = {length: threading.Event() for length in (300, 301, 3)}
    launched = {length: threading.Event() for length in gates}

    def compute(batch: Batch) -> None:
        length = len(batch.requests[0].prompt.token_ids)
        launched[length].set()
        assert gates[length].wait(60)

    runner = ScriptedRunner(concurrent_launches=2, on_launch=compute, default_batch_tokens=300)
    engine = engine_over(lambda: runner, launches=2)
    async with running(engine), trio.open_nursery() as nursery:
        gates[3].set()
        for _ in range(100):  # what makes short rows more than an eighth of all tokens
            await engine.submit(request(1, 2, 3))
        nursery.start_soon(engine.submit, request(*range(300)))
        await in_thread(launched[300].wait)
        nursery.start_soon(engine.submit, request(*range(301)))
        launched[3].clear()
        await engine.submit(request(1, 2, 3))
        assert launched[3].is_set()
        assert not launched[301].is_set(), "it waits for the thread that computes the other long row"
        gates[300].set()
        await in_thread(launched[301].wait)
        gates[301].set()


async def test_the_next_batch_is_launched_while_one_computes_if_the_runner_has_threads_of_its_own():
    gates = {token: threading.Event() for token in range(1, 6)}
    launched = {token: threading.Event() for token in gates}

    def compute(batch: Batch) -> None:
        token = int(batch.requests[0].prompt.token_ids[0])
        launched[token].set()
        assert gates[token].wait(60)

    runner = ScriptedRunner(has_own_threads=True, on_launch=compute, default_batch_tokens=1000)
    engine = engine_over(lambda: runner)
    outputs: dict[int, PoolingOutput] = {}

    async def one(token: int, length: int = 1) -> None:
        outputs[token] = await engine.submit(request(*[token] * length))

    async with running(engine), trio.open_nursery() as nursery:
        gates[1].set()
        for _ in range(10):  # of such rows a batch may be taken ahead
            await one(1, 40)
        nursery.start_soon(one, 2)
        await in_thread(launched[2].wait)
        nursery.start_soon(one, 3)
        nursery.start_soon(one, 3)
        await in_thread(launched[3].wait)
        assert runner.rows[-1] == 2, "both of them, in one batch"
        nursery.start_soon(one, 4)
        await wait_all_tasks_blocked(0.05)
        assert not launched[4].is_set(), "only one batch is launched ahead"
        waited = time.perf_counter()
        for token in (2, 4):
            gates[token].set()
        await in_thread(launched[4].wait)
        gates[3].set()
    assert outputs[3].queue_s > 0.04, "the time behind the other batch counts as waiting"
    assert outputs[3].forward_s < time.perf_counter() - waited

    launched[1].clear()
    async with running(engine_over(lambda: runner)) as engine, trio.open_nursery() as nursery:
        for gate in gates.values():
            gate.clear()
        nursery.start_soon(engine.submit, request(5))
        await in_thread(launched[5].wait)
        nursery.start_soon(engine.submit, request(*[1] * 900))
        await wait_all_tasks_blocked(0.05)
        assert not launched[1].is_set(), "short rows would wait behind it"
        gates[1].set()
        gates[5].set()
    assert launched[1].is_set()


async def test_long_rows_use_both_threads_where_no_short_ones_arrive():
    together = threading.Barrier(2)
    runner = ScriptedRunner(
        concurrent_launches=2, on_launch=lambda batch: together.wait(60) and None, default_batch_tokens=300
    )
    engine = engine_over(lambda: runner, launches=2)
    async with running(engine), trio.open_nursery() as nursery:
        for length in (300, 301):
            nursery.start_soon(engine.submit, request(*range(length)))
    assert len(runner.batches) == 2


async def test_priority_decides_who_rides_next(engine, scripted):
    scripted.default_batch_tokens = 1
    async with computing(engine, scripted) as nursery:
        nursery.start_soon(engine.submit, request(*[2] * 60, priority=1))
        await wait_all_tasks_blocked()
        nursery.start_soon(engine.submit, request(*[3] * 60, priority=0))
        await wait_all_tasks_blocked()
    assert [batch.requests[0].prompt.token_ids[0] for batch in scripted.batches] == [1, 3, 2]


@pytest.mark.usefixtures("one_in_flight")
async def test_rows_that_wait_behind_a_batch_of_late_ones_are_computed(scripted):
    scripted.default_batch_tokens = 1
    async with running(engine_over(lambda: scripted)) as engine, computing(engine, scripted) as nursery:

        @nursery.start_soon
        async def late() -> None:
            with pytest.raises(DeadlineExceededError):
                await engine.submit(request(2, deadline=trio.current_time()))

        nursery.start_soon(partial(engine.submit, request(3, priority=1)))
        await wait_all_tasks_blocked()
    assert [batch.requests[0].prompt.token_ids[0] for batch in scripted.batches] == [1, 3]


async def test_matryoshka_dimensions_reach_the_runner(engine):
    output = await engine.submit(request(5, params=(Embed(dimensions=2),)))
    assert output.values[0].tolist() == [1, 5]


# -- states -------------------------------------------------------------------------------------------


async def test_before_the_model_is_loaded_work_is_refused(scripted):
    loading = threading.Event()

    def load() -> ScriptedRunner:
        loading.wait()
        return scripted

    engine = engine_over(load)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        assert engine.statistics().state == "loading"
        with pytest.raises(EngineLoadingError):
            await engine.submit(request(1))
        with pytest.raises(EngineLoadingError):
            engine.admit(EstimatedWork(tokens=1))
        with pytest.raises(EngineLoadingError):
            _ = engine.facts.dimensions
        loading.set()
        await engine.wait_ready()
        assert engine.statistics().state == "ready"
        assert engine.facts.dimensions == 8
        nursery.cancel_scope.cancel()
    assert engine.statistics().state == "dead"


async def test_a_model_that_cannot_be_loaded_ends_the_engine_as_itself(scripted):
    def load() -> ScriptedRunner:
        raise ModelLoadError("no such model")

    engine = engine_over(load)
    with pytest.raises(ModelLoadError, match="no such model"):
        await engine.run()
    with pytest.raises(EngineDeadError):
        await engine.wait_ready()


async def test_loading_does_not_keep_a_process_that_is_told_to_leave(scripted):
    release = threading.Event()

    def load() -> ScriptedRunner:
        release.wait()
        return scripted

    async with trio.open_nursery() as nursery:
        await nursery.start(engine_over(load).run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    release.set()


DEATHS = {"the device is lost": RunnerDeadError("lost"), "the runner exits": SystemExit(3)}


@pytest.mark.parametrize("error", DEATHS.values(), ids=DEATHS)
async def test_a_dead_engine_fails_every_waiter_and_refuses_new_work(scripted, error):
    def die(batch: Batch) -> None:
        raise error

    scripted.on_launch = die
    scripted.gate.clear()
    engine = engine_over(lambda: scripted)
    failed: list[int] = []

    async def one(token: int) -> None:
        with pytest.raises(EngineDeadError):
            await engine.submit(request(token))
        failed.append(token)

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as waiters:
                    for token in range(20):
                        waiters.start_soon(one, token)
                    await in_thread(scripted.launching.wait)
                    scripted.gate.set()
    assert caught.group_contains(EngineDeadError)
    assert sorted(failed) == list(range(20))
    assert engine.statistics().state == "dead"
    assert engine.statistics().queued_rows == 0
    assert engine.statistics().in_flight_batches == 0
    with pytest.raises(EngineDeadError):
        await engine.submit(request(1))


@pytest.mark.parametrize("wedged_in", ["launch", "copy"])
async def test_a_batch_that_never_comes_back_means_that_the_device_is_wedged(scripted, wedged_in):
    class NeverCopied:
        def __await__(self):
            yield from trio.sleep_forever().__await__()

    if wedged_in == "launch":
        scripted.gate.clear()
    else:
        scripted.on_launch = lambda batch: NeverCopied()
    engine = engine_over(lambda: scripted, batch_timeout_s=0.05)
    outcome: list[Exception] = []

    async def one() -> None:
        try:
            await engine.submit(request(1))
        except EngineDeadError as error:
            outcome.append(error)

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            with trio.CancelScope(shield=True):
                await one()
    assert caught.group_contains(EngineDeadError, match="wedged")
    assert len(outcome) == 1
    scripted.gate.set()


async def test_the_queue_is_bounded_by_the_time_that_batches_take(scripted):
    async with running(engine_over(lambda: scripted, max_queue_s=1)) as engine:
        with engine.admit(EstimatedWork(tokens=10**9)):
            engine.refuse_late(EstimatedWork(tokens=1))  # no rate is known
            await engine.submit_all([request(1)] * 1000)  # many batches: most leave some waiting
            assert engine.statistics().tokens_per_s > 0
            assert engine.statistics().waiting_s > 1
            with pytest.raises(OverloadedError) as caught, engine.admit(EstimatedWork(tokens=10**9)):
                pytest.fail("admitted")
        assert caught.value.retry_after_s >= 1
        assert engine.statistics().admitted_tokens == 0


async def test_a_row_whose_deadline_has_passed_is_not_computed(scripted):
    async with running(engine_over(lambda: scripted)) as engine:
        late = replace(request(1), deadline=trio.current_time())
        with pytest.raises(DeadlineExceededError):
            await engine.submit(late)
        assert scripted.batches == []
        await engine.submit_all([request(2), replace(request(3), deadline=trio.current_time() + 60)])
        assert engine.statistics().queued_rows == 0


async def test_a_row_that_could_not_be_computed_before_its_deadline_is_refused_early(scripted):
    async with running(engine_over(lambda: scripted)) as engine:
        for _ in range(MIN_BATCHES):
            engine.dispatcher.rates.observe(0, 1, 3600.0, left_waiting=True)
        queue, soon = Scheduler(seconds_of=engine.dispatcher.seconds_of), trio.current_time() + 60
        first, second = (QueueEntry(replace(request(number), deadline=soon)) for number in range(2))
        queue.put_nowait(first)
        assert queue.take(BatchLimits(100)) == [first]  # nothing waits: it may be faster than it was
        queue.put_nowait(second, QueueEntry(request(*[2] * 100)))
        assert len(queue.take(BatchLimits(100))[0].request.prompt.token_ids) == 100
        assert isinstance(second.error, DeadlineExceededError)


async def test_its_repr_tells_its_state(engine):
    assert repr(engine) == "<Engine ready, <Scheduler 0 rows, 0 tokens>, 0 batches in flight>"


async def test_ending_the_engine_between_two_slices_of_a_delivery_fails_the_rest(scripted):
    scripted.default_batch_tokens = 10_000
    engine = engine_over(lambda: scripted)
    answered: list[int] = []
    failed: list[int] = []
    first_answer = trio.Event()

    async def one(token: int) -> None:
        try:
            await engine.submit(request(token))
            answered.append(token)
            first_answer.set()
        except EngineDeadError:
            failed.append(token)

    scripted.gate.clear()
    with trio.fail_after(10):
        async with trio.open_nursery() as waiters, trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            waiters.start_soon(one, 1)
            await in_thread(scripted.launching.wait)
            for token in range(2, 1002):
                waiters.start_soon(one, token)
            await wait_all_tasks_blocked()
            scripted.gate.set()
            await first_answer.wait()
            while len(answered) < 2:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert sorted(answered + failed) == list(range(1, 1002))
    assert failed


async def test_a_row_without_tokens_fails_alone(engine):
    empty = PoolingRequest(RenderedPrompt(np.zeros(0, dtype=np.int32)))
    with pytest.raises(BatchFailedError, match="no tokens"):
        await engine.submit(empty)
    assert (await engine.submit(request(1, 2))).values


# -- the first row --------------------------------------------------------------------------------------

PROBE = request(5, 6)


def broken(_) -> None:
    raise ValueError("broken")


async def test_an_engine_is_ready_once_it_has_computed_a_row():
    runner = ScriptedRunner(probe_request=PROBE)
    async with running(engine_over(lambda: runner)) as engine:
        assert [batch.requests for batch in runner.batches] == [(PROBE,)]
        assert engine.statistics().state == "ready"
        assert engine.facts.probe_request is PROBE


async def test_a_model_that_cannot_compute_its_first_row_ends_the_engine_as_one_that_cannot_be_loaded():
    engine = engine_over(lambda: ScriptedRunner(probe_request=PROBE, on_launch=broken))
    with pytest.raises(ModelLoadError, match="cannot compute"):
        await engine.run()
    with pytest.raises(EngineDeadError):
        await engine.wait_ready()


async def test_a_model_that_answers_nan_ends_the_engine_as_one_that_cannot_be_loaded():
    nan = CopiedBatch([(np.array([np.nan], dtype=np.float32),)])
    engine = engine_over(lambda: ScriptedRunner(probe_request=PROBE, on_launch=lambda _: nan))
    with pytest.raises(ModelLoadError, match="not finite"):
        await engine.run()

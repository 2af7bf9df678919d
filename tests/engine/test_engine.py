"""The engine over a scripted runner: the same loop, overlapped and serial."""

import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import Outcomes, compute_window, computing, engine_over, in_thread, request, row, running
from tests.scripted_runner import ScriptedRunner, scripted_vector
from trio_pool_serve.engine import local_device
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import RowValues
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import Outputs, QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.speed import MIN_BATCHES
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
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, CopiedBatch, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


@pytest.fixture(params=[1, 2], ids=["serial", "overlapped"])
async def engine(request, scripted: ScriptedRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setattr(local_device, "MAX_IN_FLIGHT", request.param)
    async with running(engine_over(scripted)) as ready:
        yield ready


async def test_freed_memory_is_returned_after_a_while_in_which_there_were_batches(scripted, mock_clock, monkeypatch):
    returned, loop = trio.Semaphore(0), trio.lowlevel.current_trio_token()
    threads: set[threading.Thread] = set()

    def return_memory() -> None:
        threads.add(threading.current_thread())
        loop.run_sync_soon(returned.release)

    monkeypatch.setattr(local_device, "return_freed_memory", return_memory)
    async with running(engine_over(scripted)) as engine:
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


async def test_an_improvement_is_prepared_while_rows_are_computed_and_changes_over_between_batches(scripted):
    """Its steps run in the thread that launches, in order, and never during a launch."""
    preparing, prepared, done = threading.Event(), threading.Event(), threading.Event()
    order: list[tuple[str, str]] = []

    def note(what: str) -> None:
        order.append((what, threading.current_thread().name))

    def prepare() -> list[Callable[[], None]]:
        preparing.set()
        prepared.wait()
        return [partial(note, "first"), partial(note, "second"), done.set]

    scripted.improvements = (prepare,)
    scripted.on_launch = lambda _: note("batch")
    async with running(engine_over(scripted)) as engine:
        await in_thread(preparing.wait)
        await engine.submit(request(5))  # meanwhile
        async with computing(engine, scripted):
            prepared.set()
            await wait_all_tasks_blocked(0.01)
            assert order == [("batch", "launch")]
        await in_thread(done.wait)
    assert order == [(what, "launch") for what in ("batch", "batch", "first", "second")]


@pytest.mark.parametrize("fails_at", ["prepare", "step"])
async def test_an_improvement_that_fails_is_a_line_in_the_log(scripted, caplog, fails_at: str):
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: "could not be compiled" not in record.getMessage() or not logged.set())

    def fail() -> list[Callable[[], None]]:
        raise OSError("no compiler\nwith more lines")

    scripted.improvements = (fail if fails_at == "prepare" else lambda: [fail],)
    async with running(engine_over(scripted)) as engine:
        await in_thread(logged.wait)
        assert (await engine.submit(request(5))).values[0][0] == 1
    assert "the model could not be compiled: no compiler" in caplog.messages


async def test_a_step_of_an_improvement_that_does_not_return_ends_the_engine_as_a_launch_does(scripted):
    never = threading.Event()
    scripted.improvements = (lambda: [never.wait],)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            async with running(engine_over(scripted, batch_timeout_s=0.05)):
                await trio.sleep_forever()
    finally:
        never.set()
    assert caught.group_contains(EngineDeadError, match="wedged")


async def test_an_engine_is_cancelled_at_once_while_an_improvement_is_prepared(scripted):
    preparing, never = threading.Event(), threading.Event()
    scripted.improvements = (lambda: preparing.set() or never.wait() or (),)
    try:
        async with running(engine_over(scripted)):
            await in_thread(preparing.wait)
    finally:
        never.set()


async def test_every_row_gets_its_own_answer_however_it_was_batched(engine, scripted):
    outcomes = Outcomes()
    async with trio.open_nursery() as nursery:
        for index in range(200):
            nursery.start_soon(outcomes.submit, engine, index, request(*range(1, index % 9 + 2), index))
    for index in range(200):
        assert outcomes.answered[index].values[0][3] == index
        assert outcomes.answered[index].values[0][0] == index % 9 + 2
    assert sum(scripted.rows) == 200
    assert len(scripted.rows) < 200


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

    def rows_done(outputs: Outputs) -> None:
        told.extend(index for index, _ in outputs)

    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit_all, [request(1), request(2)], rows_done)
        await in_thread(scripted.launching.wait)
        nursery.cancel_scope.cancel()
    scripted.gate.set()
    await engine.submit_all([request(3)], rows_done)
    assert told == [0], "of the second submission alone"


async def test_overlapping_launches_the_next_batch_before_the_last_one_is_copied(scripted, monkeypatch):
    async def copy(batch: Batch) -> RowValues:
        await copied.wait()
        return [(scripted_vector(row.prompt.token_ids, 8),) for row in batch.requests]

    scripted.on_launch = copy
    for in_flight in (1, 2):
        monkeypatch.setattr(local_device, "MAX_IN_FLIGHT", in_flight)
        copied = trio.Event()
        scripted.batches.clear()
        async with running(engine_over(scripted)) as engine, trio.open_nursery() as nursery:
            for token in range(1, 4):
                nursery.start_soon(engine.submit, request(token))
                await wait_all_tasks_blocked(0.05)
            assert len(scripted.batches) == in_flight
            assert engine.statistics().in_flight_batches == in_flight
            copied.set()


@pytest.mark.parametrize("launch_before", [2, 1], ids=["as at start", "chosen while it was loaded"])
async def test_a_runner_with_two_launch_threads_computes_two_batches_at_a_time(launch_before: int):
    together, offload = threading.Barrier(2), Offload(launch=launch_before)
    runner = ScriptedRunner(concurrent_launches=2, on_launch=lambda batch: together.wait(60) and None)

    def load() -> ScriptedRunner:
        offload.launch = 2
        return runner

    engine, outcomes = engine_over(load, offload=offload), Outcomes()
    async with running(engine):
        for first in range(1, 21, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outcomes.submit, engine, first, request(first))
                await in_thread(runner.launching.wait)
                nursery.start_soon(outcomes.submit, engine, first + 1, request(first + 1))
            runner.launching.clear()
    assert runner.rows == [1] * 20
    assert {n: output.values[0][3] for n, output in outcomes.answered.items()} == {n: n for n in range(1, 21)}
    assert engine.devices.offload.statistics()["launch"].borrowed == 0


@pytest.mark.parametrize("kind", ["launch", "background"])
async def test_rows_that_arrive_at_once_fill_all_threads_though_they_wake_one_task(kind: str):
    """The task that is woken takes a batch, and wakes the next one for what it leaves."""
    together = threading.Barrier(3)
    runner = ScriptedRunner(
        concurrent_launches=3, background_launches=3, on_launch=lambda batch: together.wait(60) and None
    )
    rows = [row(40), row(41), row(42)]  # each fills a batch
    with trio.fail_after(60):
        async with running(engine_over(runner, offload=Offload(launch=3, idle_launches=3))) as engine:
            if kind == "background":
                await compute_window(engine, rows)
            else:
                await engine.submit_all(rows)
    assert len(runner.batches) == 3


async def test_the_next_batch_is_launched_while_one_computes_if_the_runner_has_threads_of_its_own():
    gates = {token: threading.Event() for token in range(1, 6)}
    launched = {token: threading.Event() for token in gates}

    def compute(batch: Batch) -> None:
        token = int(batch.requests[0].prompt.token_ids[0])
        launched[token].set()
        assert gates[token].wait(60)

    runner = ScriptedRunner(has_own_threads=True, on_launch=compute, default_batch_tokens=1000)
    engine, outcomes = engine_over(runner), Outcomes()
    async with running(engine), trio.open_nursery() as nursery:
        gates[1].set()
        for _ in range(10):  # of such rows a batch may be taken ahead
            await engine.submit(request(*[1] * 40))
        nursery.start_soon(engine.submit, request(2))
        await in_thread(launched[2].wait)
        nursery.start_soon(outcomes.submit, engine, 3, request(3))
        nursery.start_soon(outcomes.submit, engine, 3, request(3))
        await in_thread(launched[3].wait)
        assert runner.rows[-1] == 2, "both of them, in one batch"
        nursery.start_soon(engine.submit, request(4))
        await wait_all_tasks_blocked(0.05)
        assert not launched[4].is_set(), "only one batch is launched ahead"
        waited = time.perf_counter()
        for token in (2, 4):
            gates[token].set()
        await in_thread(launched[4].wait)
        gates[3].set()
    assert outcomes.answered[3].queue_s > 0.04, "the time behind the other batch counts as waiting"
    assert outcomes.answered[3].forward_s < time.perf_counter() - waited

    launched[1].clear()
    async with running(engine_over(runner)) as engine, trio.open_nursery() as nursery:
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


@pytest.mark.usefixtures("one_in_flight")
async def test_rows_that_wait_behind_a_batch_of_late_ones_are_computed(scripted):
    scripted.default_batch_tokens = 1
    async with running(engine_over(scripted)) as engine, computing(engine, scripted) as nursery:

        @nursery.start_soon
        async def late() -> None:
            with pytest.raises(DeadlineExceededError):
                await engine.submit(request(2, deadline=trio.current_time()))

        nursery.start_soon(partial(engine.submit, request(3, priority=1)))
        await wait_all_tasks_blocked()
    assert [batch.requests[0].prompt.token_ids[0] for batch in scripted.batches] == [1, 3]


# -- states -------------------------------------------------------------------------------------------

PROBE = request(5, 6)


async def test_before_the_model_is_loaded_and_has_computed_a_row_work_is_refused():
    loading, runner = threading.Event(), ScriptedRunner(probe_request=PROBE)
    engine = engine_over(lambda: loading.wait() and runner)
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
        assert [batch.requests for batch in runner.batches] == [(PROBE,)]
        assert engine.statistics().state == "ready"
        assert (engine.facts.dimensions, engine.facts.probe_request) == (8, PROBE)
        nursery.cancel_scope.cancel()
    assert engine.statistics().state == "dead"


def broken(*_) -> None:
    raise ModelLoadError("broken")


NAN = CopiedBatch([(np.array([np.nan], dtype=np.float32),)])

UNUSABLE = {
    "it cannot be loaded": (broken, "broken"),
    "it cannot compute its first row": (ScriptedRunner(probe_request=PROBE, on_launch=broken), "cannot compute"),
    "its first row is not finite": (ScriptedRunner(probe_request=PROBE, on_launch=lambda _: NAN), "not finite"),
}


@pytest.mark.parametrize(("runner", "reason"), UNUSABLE.values(), ids=UNUSABLE)
async def test_a_model_that_cannot_be_used_ends_the_engine_with_the_reason(runner, reason):
    engine = engine_over(runner)
    with pytest.raises(ModelLoadError, match=reason):
        await engine.run()
    with pytest.raises(EngineDeadError):
        await engine.wait_ready()


async def test_loading_does_not_keep_a_process_that_is_told_to_leave():
    release = threading.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine_over(release.wait).run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    release.set()


class NeverCopied:
    def __await__(self):
        yield from trio.sleep_forever().__await__()


def failing_with(error: BaseException) -> Callable[[Batch], None]:
    def fail(_: Batch) -> None:
        raise error

    return fail


IS_OVER = threading.Event()

DEATHS = {
    "the device is lost": (failing_with(RunnerDeadError("lost")), math.inf, "lost"),
    "the runner exits": (failing_with(SystemExit(3)), math.inf, "SystemExit"),
    "a launch does not return": (lambda _: IS_OVER.wait(60) and None, 0.05, "wedged"),
    "a copy does not return": (lambda _: NeverCopied(), 0.05, "wedged"),
}


@pytest.mark.parametrize(("on_launch", "timeout_s", "reason"), DEATHS.values(), ids=DEATHS)
async def test_a_dead_engine_fails_every_waiter_and_refuses_new_work(scripted, on_launch, timeout_s, reason):
    scripted.on_launch = on_launch
    scripted.gate.clear()
    IS_OVER.clear()
    engine, outcomes = engine_over(scripted, batch_timeout_s=timeout_s), Outcomes()
    with pytest.raises(ExceptionGroup) as caught:
        async with running(engine):
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as waiters:
                    for token in range(20):
                        waiters.start_soon(outcomes.submit, engine, token, request(token))
                    await in_thread(scripted.launching.wait)
                    scripted.gate.set()
    IS_OVER.set()
    assert caught.group_contains(EngineDeadError, match=reason)
    assert {token: type(error) for token, error in outcomes.failed.items()} == dict.fromkeys(range(20), EngineDeadError)
    assert engine.statistics().state == "dead"
    assert engine.statistics().queued_rows == 0
    assert engine.statistics().in_flight_batches == 0
    with pytest.raises(EngineDeadError):
        await engine.submit(request(1))


async def test_a_pause_of_the_whole_process_does_not_count_as_a_batch_that_takes_too_long(scripted, mock_clock):
    """Only ticks of the loop count: six, and the one that has begun."""
    engine, outcomes = engine_over(scripted, batch_timeout_s=6.0), Outcomes()
    with pytest.raises(ExceptionGroup) as caught:
        async with running(engine):
            async with computing(engine, scripted):
                await wait_all_tasks_blocked()
                mock_clock.jump(1000)
                for _ in range(5):
                    await wait_all_tasks_blocked()
                    mock_clock.jump(1.0)
                await wait_all_tasks_blocked()
            scripted.gate.clear()
            scripted.launching.clear()
            async with trio.open_nursery() as waiters:
                waiters.start_soon(outcomes.submit, engine, 2, request(2))
                await in_thread(scripted.launching.wait)
                for _ in range(7):
                    await wait_all_tasks_blocked()
                    assert not outcomes.failed
                    mock_clock.jump(1.0)
                await wait_all_tasks_blocked()
                scripted.gate.set()
    assert caught.group_contains(EngineDeadError, match="a batch takes more than 6 s")
    assert isinstance(outcomes.failed[2], EngineDeadError)


async def test_the_queue_is_bounded_by_the_time_that_batches_take(scripted):
    async with running(engine_over(scripted, max_queue_s=1)) as engine:
        with engine.admit(EstimatedWork(tokens=10**9)):
            engine.refuse_late(EstimatedWork(tokens=1))  # no rate is known
            await engine.submit_all([request(1)] * 1000)  # many batches: most leave some waiting
            assert engine.statistics().tokens_per_s > 0
            assert engine.statistics().waiting_s > 1
            with pytest.raises(OverloadedError) as caught, engine.admit(EstimatedWork(tokens=10**9)):
                pytest.fail("admitted")
        assert caught.value.retry_after_s >= 1
        assert engine.statistics().admitted_tokens == 0


async def test_a_row_that_could_not_be_computed_before_its_deadline_is_refused_early(scripted):
    async with running(engine_over(scripted)) as engine:
        for _ in range(MIN_BATCHES):
            engine.queue.dispatcher.rates.observe(0, 1, 3600.0, left_waiting=True)
        queue, soon = Scheduler(rates=engine.queue.rates), trio.current_time() + 60
        first, second = (QueueEntry(replace(request(number), deadline=soon)) for number in range(2))
        queue.put_nowait(first)
        assert queue.take(BatchLimits(100)) == [first]  # nothing waits: it may be faster than it was
        queue.put_nowait(second, QueueEntry(request(*[2] * 100)))
        assert len(queue.take(BatchLimits(100))[0].request.prompt.token_ids) == 100
        assert isinstance(second.error, DeadlineExceededError)


async def test_ending_the_engine_between_two_slices_of_a_delivery_fails_the_rest(scripted):
    scripted.default_batch_tokens = 10_000
    engine, outcomes = engine_over(scripted), Outcomes()
    scripted.gate.clear()
    with trio.fail_after(10):
        async with trio.open_nursery() as waiters, running(engine):
            waiters.start_soon(outcomes.submit, engine, 1, request(1))
            await in_thread(scripted.launching.wait)
            for token in range(2, 1002):
                waiters.start_soon(outcomes.submit, engine, token, request(token))
            await wait_all_tasks_blocked()
            scripted.gate.set()
            while len(outcomes.answered) < 2:
                await trio.lowlevel.checkpoint()
    assert sorted([*outcomes.answered, *outcomes.failed]) == list(range(1, 1002))
    assert {type(error) for error in outcomes.failed.values()} == {EngineDeadError}


async def test_a_row_without_tokens_fails_alone(engine):
    empty = PoolingRequest(RenderedPrompt(np.zeros(0, dtype=np.int32)))
    with pytest.raises(BatchFailedError, match="no tokens"):
        await engine.submit(empty)
    assert (await engine.submit(request(1, 2))).values

"""An ``Engine`` over real sockets; what computes at their other ends runs in this process."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import trio
from attrs import field, frozen
from trio.testing import wait_all_tasks_blocked

from tests.conftest import until
from tests.engine.engines import Members, compute_window, linked_engine
from tests.engine.remote.replicas import Replica, asking, frame_of, outcome_of, request, two_alive
from tests.engine.remote.test_wire import alike, types_of
from tests.scripted_runner import scripted_vector
from trio_pool_serve.config import computing_config
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.planned_window import planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.parts import row_frames
from trio_pool_serve.engine.remote.wire import Answers, BatchFacts, Hello, Submit
from trio_pool_serve.errors import (
    BatchFailedError,
    EngineDeadError,
    EngineLoadingError,
    UnsendableError,
)
from trio_pool_serve.types import (
    Embed,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
)


@pytest.fixture(params=["unix", "tcp"])
def make(request: pytest.FixtureRequest, tmp_path: Path, one_in_flight: None) -> Callable[..., Replica]:
    """Make replicas behind sockets of one kind: what is true for one is for the other."""

    def make(number: int = 0, **options) -> Replica:
        return Replica(tmp_path / f"{number}.engine", by_tcp=request.param == "tcp", **options)

    return make


@pytest.fixture
async def replica(make: Callable[..., Replica]) -> AsyncIterator[Replica]:
    replica = make()
    async with replica.listen():
        yield replica


@pytest.fixture
async def engine(replica: Replica) -> AsyncIterator[Engine]:
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        yield engine


async def test_rows_are_computed_at_the_other_end(replica, engine):
    assert (engine.facts.dimensions, engine.facts.embeds_width) == (8, 0)
    outputs = await engine.submit_all([request(5, index, params=(Embed(), SparseEmbed())) for index in range(40)])
    for index, output in enumerate(outputs):
        vector, sparse = output.values
        np.testing.assert_array_equal(vector, scripted_vector(np.array([5, index]), 8))
        assert sparse.indices.tolist() == sorted({5, index})
        assert min(output.queue_s, output.forward_s) > 0
    assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
    assert replica.engine.statistics().tokens_per_s > 0


async def test_a_probe_row_comes_with_the_sizes(replica):
    replica.runner.probe_request = PoolingRequest(RenderedPrompt(np.array([5, 6], np.int32)), (SparseEmbed(),))
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        begun = len(replica.runner.batches)
        assert begun == 1, "the probe at the start"
        row = engine.facts.probe_request
        assert row.params == (SparseEmbed(),)
        assert row.prompt.token_ids.tolist() == [5, 6]
        assert (await engine.submit(row)).values


async def test_a_stalled_replica_gets_no_rows_while_another_is_healthy(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(computing_config, "STALL_SHARE", 1e-3)  # it stalls, and does not end
    stalling = make(0, stall_timeout_s=0.05)
    healthy = make(1)
    async with two_alive(stalling, healthy), asking(stalling, healthy) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        stalling.runner.gate.clear()
        healthy.runner.gate.clear()
        for batches in (1, 2):  # each device gets one
            nursery.start_soon(engine.submit, request(1))
            await until(lambda number=batches: len(engine.queue.dispatcher.in_flight) == number)
        healthy.runner.gate.set()
        await until(lambda: engine.devices.links[0].stall_reason)
        assert engine.statistics().state == "ready"
        assert engine.devices.stall_reason == ""
        before = sum(stalling.runner.rows)
        await engine.submit_all([request(2)] * 40)
        assert sum(stalling.runner.rows) == before
        stalling.runner.gate.set()
        await until(lambda: not engine.devices.links[0].stall_reason and engine.devices.links[0].room > 0)


async def test_an_engine_process_that_says_nothing_is_stalled(replica):
    async with asking(replica, stall_timeout_s=0.5) as engine, await replica.accept() as stream:
        await stream.send_all(frame_of(Hello(8, 0, 2048)))
        await engine.wait_ready()
        await until(lambda: engine.statistics().state == "stalled")
        assert "silent" in engine.devices.stall_reason
        await stream.send_all(frame_of(Answers([], [], 2048)))
        await until(lambda: engine.statistics().state == "ready")
        await stream.send_all(frame_of(Answers([], [], 2048, stall_reason="a batch has been in flight")))
        await until(lambda: engine.devices.stall_reason == "a batch has been in flight")


async def test_a_stopped_engine_process_is_disconnected_and_another_computes_its_rows(make, monkeypatch):
    """After it has said how it computes: before that, it may load for minutes. The other has a second to be ready."""
    monkeypatch.setattr(computing_config, "LEAST_SILENCE_S", 1.0)
    stopped, healthy = make(0), make(1, stall_timeout_s=1.0)
    async with stopped.listen(), healthy.listen(), asking(stopped, healthy, stall_timeout_s=1.0) as engine:
        link = engine.devices.links[0]
        async with await stopped.accept() as stream, trio.open_nursery() as nursery:
            await trio.sleep(2 * link.silence_timeout_s)
            await stream.send_all(frame_of(Hello(8, 0, 2048)))
            await engine.wait_ready()
            assert link.failure == ""
            nursery.start_soon(engine.submit_all, [request(1), request(2)])
            await until(lambda: link.in_flight)
            async with healthy.live():
                await until(lambda: link.losses)
                assert link.failure == "nothing was received for 1 s"
                await until(lambda: sum(healthy.runner.rows) == 2)
                nursery.cancel_scope.cancel()


async def test_a_process_that_dies_fails_its_rows_at_once_and_the_next_one_takes_over(replica):
    async with asking(replica) as engine:
        with pytest.raises(EngineLoadingError):
            await engine.submit(request(1))
        failed = []

        async def ask() -> None:
            try:
                await engine.submit_all([request(1), request(2)])
            except EngineDeadError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            async with replica.live():
                await engine.wait_ready()
                replica.runner.gate.clear()
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                await trio.to_thread.run_sync(replica.runner.launching.wait)
            await until(lambda: len(failed) == 2)
        assert engine.statistics().state == "loading"
        assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
        with pytest.raises(EngineLoadingError):
            await engine.submit(request(1))
        async with replica.live():
            await engine.wait_ready()
            assert (await engine.submit(request(9))).values[0][2] == 9


async def test_an_engine_that_stops_fails_the_requests_that_wait(replica):
    async with replica.live():
        engine = linked_engine([replica.connector])
        async with trio.open_nursery() as nursery:
            running = await nursery.start(scoped, engine)
            await engine.wait_ready()
            replica.runner.gate.clear()

            async def ask() -> None:
                with pytest.raises(EngineDeadError):
                    await engine.submit(request(1))

            nursery.start_soon(ask)
            await trio.to_thread.run_sync(replica.runner.launching.wait)
            running.cancel()
        assert engine.statistics().state == "dead"
        with pytest.raises(EngineDeadError):
            await engine.submit(request(1))


async def scoped(engine: Engine, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await engine.run()


async def test_cancelling_at_any_step_leaves_nothing_behind(replica, engine):
    for step in range(40):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.submit_all, [request(1), request(2, 2)])
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
    await until(lambda: not replica.engine.statistics().queued_rows)
    await wait_all_tasks_blocked(0.01)
    assert (await engine.submit(request(9))).values[0][2] == 9


async def test_a_request_that_waits_for_a_process_that_dies_before_it_is_ready_gets_the_next_one(replica):
    async with asking(replica) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.wait_ready)
        await (await replica.accept()).aclose()
        await wait_all_tasks_blocked()
        async with replica.live():
            await engine.wait_ready()
            assert (await engine.submit(request(9))).values[0][2] == 9


# -- what cannot be sent or understood fails alone -------------------------------------------------------


@frozen
class Unsendable(PoolingParams):
    """Params whose field has no form in msgpack."""

    value: object = field(factory=object)


@pytest.mark.parametrize(
    "wrong",
    [
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), (Unsendable(),)),
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), ("embed",)),
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), (Embed(dimensions="many"),)),
    ],
    ids=["an object", "no params", "a field of another type"],
)
async def test_a_row_that_cannot_be_sent_or_read_fails_alone(replica, engine, wrong):
    hello = engine.devices.links[0].hello
    found: dict[int, PoolingOutput | Exception] = {}

    async def ask(number: int, asked: PoolingRequest) -> None:
        found[number] = await outcome_of(engine, asked)

    async with trio.open_nursery() as nursery:  # they go in one frame
        for number, asked in enumerate((request(5), wrong, request(6))):
            nursery.start_soon(ask, number, asked)
    first, failed, last = [found[number] for number in range(3)]
    assert isinstance(failed, UnsendableError)
    assert [first.values[0][1], last.values[0][1]] == [5, 6]
    assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
    assert engine.devices.links[0].hello is hello, "it is the same connection"


async def test_rows_that_cannot_be_read_are_answered_by_number(replica):
    async with replica.live():
        stream = await replica.connect()
        assert isinstance((await stream.receive())[0], Hello)
        (frame,) = row_frames([(1, request(5)), (3, request(6)), (3, request(7))], pytest.fail)
        frame.add([2, 4], alike([1, 1], [("nowhere:Nothing", {})]))
        frame.add([5], alike([1], [("nowhere:Nothing", {})], 0))
        await stream.send(Submit(frame.parts, BatchFacts(0, 6)), frame.buffers)
        found: dict[int, type] = {}
        while len(found) < 5:
            message, behind = await stream.receive()
            found.update(types_of(message.parts, behind))
        assert {number for number, kind in found.items() if kind is UnsendableError} == {2, 4, 5}
        assert {number for number, kind in found.items() if kind is PoolingOutput} == {1, 3}
        await stream.aclose()
        await until(lambda: not replica.engine.statistics().queued_rows)
        async with asking(replica) as engine:
            await engine.wait_ready()
            assert (await engine.submit(request(5))).values[0][1] == 5, "a number that is used twice ends nothing"


async def test_all_rows_of_a_planned_batch_go_to_one_replica(make):
    replicas = [make(number) for number in range(2)]
    rows = [[request(*range(1, 2 + length)) for length in range(1 + index % 7)] for index in range(20)]
    async with two_alive(*replicas), asking(*replicas) as engine:
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        results = await compute_window(engine, *rows)
    assert results == [[each.tokens for each in of_member] for of_member in rows]
    assert all(replica.runner.batches for replica in replicas)
    entries = [QueueEntry(each) for of_member in rows for each in of_member]
    whole = [[entry.request.tokens for entry in batch] for batch in planned(entries, 16)]
    batches = [batch.requests for replica in replicas for batch in replica.runner.batches if batch.is_planned]
    assert sorted([each.tokens for each in batch] for batch in batches) == sorted(whole)


async def test_background_work_waits_here_and_each_replica_has_one_batch_of_it_beside_other_rows(make):
    replicas = [make(number) for number in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        for replica in replicas:
            replica.runner.gate.clear()
        nursery.start_soon(compute_window, engine, [request(*range(1, 17)) for _ in range(1000)])
        await until(lambda: [len(device.in_flight) for device in engine.devices.links] == [1, 1])
        await until(lambda: all(replica.runner.batches for replica in replicas))
        assert len(engine.queue.scheduler.planned) == 998
        assert engine.statistics().queued_rows == 0
        nursery.start_soon(engine.submit_all, [request(7)] * 16)
        await until(lambda: sum(replica.engine.statistics().queued_rows for replica in replicas) == 16)
        for replica in replicas:
            replica.runner.gate.set()
        await until(lambda: all(len(replica.runner.batches) > 1 for replica in replicas))
        kinds = [[batch.is_planned for batch in replica.runner.batches[:2]] for replica in replicas]
        assert sorted(kinds) == [[True, False], [True, True]]
        nursery.cancel_scope.cancel()
    assert len(engine.queue.scheduler.planned) == 0


async def test_a_planned_batch_with_a_row_that_cannot_be_sent_fails_and_no_other(replica, engine):
    """The engine process would wait for its last row for ever."""
    unsendable = PoolingRequest(RenderedPrompt(np.ones(4, dtype=np.int32)), (Unsendable(),))
    results = await compute_window(engine, [unsendable], [request(1, 2, 3, 4)], [request(1)])
    assert isinstance(results[0], UnsendableError)
    assert isinstance(results[1], BatchFailedError) or results[1] == [4]
    assert await compute_window(engine, [request(1, 2)]) == [[2]]
    assert [link.waiting_rows for link in engine.devices.links] == [0]


async def test_a_planned_row_withdrawn_before_it_is_sent_is_computed_with_its_batch(replica, engine):
    members = Members(engine, 2)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope, members.window.members[1] as member:
            nursery.start_soon(members.submit, 0, request(1, 2, 3))
            await wait_all_tasks_blocked()
            # Planned in this step, and cancelled before the link's task runs.
            scope.cancel()
            await member.submit_all(engine, [request(7, 8, 9)])
    assert members.outcomes == {0: [3]}
    assert [len(batch.requests) for batch in replica.runner.batches] == [2]

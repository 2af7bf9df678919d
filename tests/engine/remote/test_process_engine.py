"""A ``ProcessEngine`` over real sockets; the engines at their other ends run in this process."""

import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from attrs import field, frozen
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.engine.remote.replicas import Replica, asking, two_alive
from tests.engine.remote.test_wire import COLUMNS
from tests.scripted_runner import scripted_vector
from trio_pool_serve.config import computing_config
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.batching import TokenBudget
from trio_pool_serve.engine.compute_rates import UNKNOWN
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.engine.queue import MAX_TOKENS_BEFORE_LONG
from trio_pool_serve.engine.remote.answers import read_answers
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.engine.remote.rows import row_frames
from trio_pool_serve.engine.remote.wire import Answers, Hello, Rows, Submit, parts_of
from trio_pool_serve.errors import (
    BatchFailedError,
    DeadlineExceededError,
    EngineDeadError,
    EngineLoadingError,
    OverloadedError,
    PoolServeError,
    UnsendableError,
)
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.types import (
    CopiedBatch,
    Embed,
    HeldQuery,
    HoldQuery,
    MaxSim,
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


EMBED = (Embed(),)


def request(*ids: int, params=EMBED) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.array(ids, dtype=np.int32)), params)


async def until(condition) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  (what is waited for happens behind a socket)
            await trio.sleep(0.001)


async def test_rows_are_computed_at_the_other_end(replica):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        assert (engine.dimensions, engine.embeds_width) == (8, 0)
        outputs = await engine.submit_all([request(5, index, params=(Embed(), SparseEmbed())) for index in range(40)])
        for index, output in enumerate(outputs):
            vector, sparse = output.values
            np.testing.assert_array_equal(vector, scripted_vector(np.array([5, index]), 8))
            assert sparse.indices.tolist() == sorted({5, index})
            assert min(output.queue_s, output.forward_s) > 0
        assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
        assert engine.statistics().tokens_per_s > 0


async def test_each_row_goes_to_the_replica_that_has_least_before_it(make):
    replicas = [make(index) for index in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine._routing.ready) == 2)
        for replica in replicas:
            replica.runner.gate.clear()
        nursery.start_soon(engine.submit_all, [request(*[1] * 10), *[request(2, 2, 2)] * 4])
        await until(lambda: sum(replica.engine.waiting_tokens for replica in replicas) == 22)
        assert sorted(replica.engine.waiting_tokens for replica in replicas) == [10, 12]
        for replica in replicas:
            replica.runner.gate.set()


@asynccontextmanager
async def two_that_wait(
    make: Callable[..., Replica],
) -> AsyncIterator[tuple[ProcessEngine, Callable[..., Awaitable[list[int]]]]]:
    """Two replicas that compute nothing until the block is left, and what sends rows of some lengths to them.

    It returns the tokens that each of the two has before it then.
    """
    replicas = [make(index) for index in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine._routing.ready) == 2)
        for replica in replicas:
            replica.runner.gate.clear()

        async def send(*lengths: int) -> list[int]:
            before = sum(link.own_tokens for link in engine._links)
            nursery.start_soon(engine.submit_all, [request(*[1] * length) for length in lengths])
            await until(lambda: sum(link.own_tokens for link in engine._links) == before + sum(lengths))
            return [link.own_tokens for link in engine._links]

        yield engine, send
        for replica in replicas:
            replica.runner.gate.set()


async def test_long_rows_keep_together_while_short_ones_come(make):
    async with two_that_wait(make) as (_, send):
        assert await send(*[10] * 52) == [260, 260]
        for number in range(1, 5):
            assert 260 + (number - 1) * 512 <= MAX_TOKENS_BEFORE_LONG
            assert await send(512) == [260, 260 + number * 512], "the last one is the one for them"
        assert await send(*[10] * 20) == [460, 260 + 4 * 512], "short ones find the other free"
        assert await send(512) == [460 + 512, 260 + 4 * 512], "long ones do not wait behind more of their like"


async def test_long_rows_are_spread_when_few_short_ones_come(make):
    async with two_that_wait(make) as (_, send):
        assert await send(*[512] * 4) == [1024, 1024], "none has come"
        assert await send(10) == [1034, 1024]
        assert await send(*[512] * 4) == [1034 + 2 * 512, 1024 + 2 * 512], "eight times ten tokens are no long row"


async def test_as_many_tokens_of_long_rows_keep_together_as_eight_times_the_short_ones(make):
    async with two_that_wait(make) as (_, send):
        assert await send(*[10] * 16) == [80, 80]
        assert await send(600, 600) == [80, 80 + 1200]
        assert await send(600) == [80 + 600, 80 + 1200], "1280 tokens were enough for two"


async def test_a_row_of_a_cancelled_request_leaves_the_queue_at_the_other_end(replica):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        replica.runner.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit, request(1))
            await trio.to_thread.run_sync(replica.runner.launching.wait)
            async with trio.open_nursery() as leaving:
                leaving.start_soon(engine.submit, request(2, 2))
                await until(lambda: replica.engine.statistics().queued_rows == 1)
                leaving.cancel_scope.cancel()
            await until(lambda: replica.engine.statistics().queued_rows == 0)
            replica.runner.gate.set()
        assert len(replica.runner.batches) == 1


async def test_a_row_in_flight_whose_request_is_cancelled_is_not_computed_again_at_the_other_end(replica):
    begun, leave = threading.Event(), threading.Event()
    passes: list[int] = []

    def fail_first(batch) -> None:
        passes.append(len(batch.requests))
        if len(passes) == 2:
            begun.set()
            assert leave.wait(60)
            raise ValueError("first")

    replica.runner.on_launch = fail_first
    async with replica.live(), asking(replica) as engine, trio.open_nursery() as nursery:
        await engine.wait_ready()
        replica.runner.gate.clear()
        nursery.start_soon(engine.submit, request(1))
        await trio.to_thread.run_sync(replica.runner.launching.wait)
        async with trio.open_nursery() as leaving:
            leaving.start_soon(engine.submit_all, [request(2)] * 6)
            nursery.start_soon(engine.submit_all, [request(3)] * 2)
            await until(lambda: replica.engine.statistics().queued_rows == 8)
            replica.runner.gate.set()
            await trio.to_thread.run_sync(begun.wait)
            entries = [entry for batch in replica.engine._in_flight for entry in batch.entries]
            leaving.cancel_scope.cancel()
        await until(lambda: sum(entry.is_abandoned for entry in entries) == 6)
        leave.set()
        await until(lambda: engine.statistics().queued_rows == 0)
        assert passes[:2] == [1, 8]
        assert sum(passes[2:]) == 2


async def test_a_probe_row_comes_with_the_sizes(replica):
    replica.runner.probe_request = PoolingRequest(RenderedPrompt(np.array([5, 6], np.int32)), (SparseEmbed(),))
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        begun = len(replica.runner.batches)
        assert begun == 1, "the probe at the start"
        row = engine.probe_request
        assert row.params == (SparseEmbed(),)
        assert row.prompt.token_ids.tolist() == [5, 6]
        assert (await engine.submit(row)).values


async def test_a_stalled_replica_gets_no_rows_while_another_is_healthy(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(computing_config, "STALL_SHARE", 1e-3)  # it stalls, and does not end
    stalling = make(0, stall_timeout_s=0.05)
    healthy = make(1)
    async with two_alive(stalling, healthy), asking(stalling, healthy) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine._routing.ready) == 2)
        stalling.runner.gate.clear()
        nursery.start_soon(engine.submit_all, [request(1)] * 2)
        await until(lambda: engine._links[0].stall_reason)
        assert engine.statistics().state == "ready"
        assert engine.stall_reason == ""
        before = sum(stalling.runner.rows)
        await engine.submit_all([request(2)] * 40)
        assert sum(stalling.runner.rows) == before
        with engine.open_scope() as scope:
            assert scope in engine._links[1].scopes
        healthy.runner.gate.clear()
        stalling.runner.gate.set()
        await until(lambda: not engine._links[0].stall_reason)
        assert len(engine._routing.candidates()) == 2
        healthy.runner.gate.set()


async def test_an_engine_process_that_says_nothing_is_stalled(replica):
    async with asking(replica, stall_timeout_s=0.05) as engine, await replica.accept() as stream:
        await stream.send_all(frame_of(Hello(8, 0, 2048)))
        await engine.wait_ready()
        await until(lambda: engine.statistics().state == "stalled")
        assert "silent" in engine.stall_reason
        await stream.send_all(frame_of(Answers([], 0, 0.0, UNKNOWN.tobytes())))
        await until(lambda: engine.statistics().state == "ready")
        await stream.send_all(frame_of(Answers([], 0, 0.0, UNKNOWN.tobytes(), "a batch has been in flight")))
        await until(lambda: engine.stall_reason == "a batch has been in flight")


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


async def test_while_one_replica_is_alive_the_engine_is_ready(make):
    first, second = (make(index) for index in range(2))
    async with first.listen(), second.listen(), first.live(), asking(first, second) as engine:
        async with second.live():
            await until(lambda: len(engine._routing.ready) == 2)
        await until(lambda: len(engine._routing.ready) == 1)
        assert engine.statistics().state == "ready"
        await engine.submit_all([request(1)] * 10)
        assert sum(first.runner.rows) == 10


async def test_a_failed_batch_is_told_as_itself(replica):
    def fail(_):
        raise ValueError("boom")

    replica.runner.on_launch = fail
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        with pytest.raises(BatchFailedError, match="forward pass failed"):
            await engine.submit(request(1))


async def test_queries_are_held_where_their_documents_go_and_end_with_the_request(make):
    replicas = [make(index) for index in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine:
        await until(lambda: len(engine._routing.ready) == 2)
        for _ in range(4):
            with engine.open_scope() as scope:
                query = HeldQuery(scope)
                await engine.submit(request(5, 6, 7, params=(HoldQuery(query),)))
                documents = [request(6, 7, 8, params=(MaxSim(query),)), request(9, params=(MaxSim(query),))]
                scores = [output.values[0][0] for output in await engine.submit_all(documents)]
                assert scores == [2, 0]
        scopes = [scope for replica in replicas for scope in replica.runner.scopes]
        assert len(scopes) == 4
        await until(lambda: all(scope.closed for scope in scopes))


async def test_what_a_process_held_is_gone_with_it(replica):
    async with asking(replica) as engine:
        async with replica.live():
            await engine.wait_ready()
            with engine.open_scope() as scope:
                query = HeldQuery(scope)
                await engine.submit(request(5, params=(HoldQuery(query),)))
                held = replica.runner.scopes[-1]
        await until(lambda: held.closed)
        async with replica.live():
            await engine.wait_ready()
            with pytest.raises(EngineDeadError, match="held the query"):
                await engine.submit(request(5, params=(MaxSim(query),)))


async def test_an_asking_process_that_leaves_takes_its_rows_and_queries_along(replica):
    async with replica.live():
        async with asking(replica) as engine:
            await engine.wait_ready()
            with engine.open_scope() as scope:
                await engine.submit(request(5, params=(HoldQuery(HeldQuery(scope)),)))
                replica.runner.gate.clear()
                replica.runner.launching.clear()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.submit, request(1))
                    await trio.to_thread.run_sync(replica.runner.launching.wait)
                    nursery.start_soon(engine.submit, request(2))
                    await until(lambda: replica.engine.statistics().queued_rows == 1)
                    nursery.cancel_scope.cancel()
        await until(lambda: replica.engine.statistics().queued_rows == 0)
        await until(lambda: replica.runner.scopes[-1].closed)


async def test_requests_are_admitted_by_the_rates_that_the_engine_processes_have_measured(replica):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        with engine.admit(EstimatedWork(tokens=10**9)):
            engine.refuse_late(EstimatedWork(tokens=1))  # no rate is known
            await engine.submit_all([request(1)] * 1000)  # many batches: most leave some waiting
            await until(lambda: not np.isnan(engine._seconds_per_token()).any())  # by TCP they are kept for a while
            # Rates are added as tokens per second: the reciprocal of a reciprocal may be off by its last bit.
            np.testing.assert_allclose(engine._seconds_per_token(), replica.engine.seconds_per_token, rtol=1e-14)
            with pytest.raises(OverloadedError), engine.admit(EstimatedWork(tokens=10**9)):
                pytest.fail("admitted")
        assert engine.statistics().admitted_tokens == 0


async def test_what_other_machines_wait_for_counts_in_admission(replica):
    async with replica.live(), asking(replica) as engine, asking(replica) as other, trio.open_nursery() as nursery:
        await engine.wait_ready()
        await other.wait_ready()
        await engine.submit_all([request(1)] * 1000)  # many batches: most leave some waiting
        alone = engine._seconds_per_token()
        replica.runner.gate.clear()
        with other.admit(EstimatedWork(tokens=300)), engine.admit(EstimatedWork(tokens=100)):
            nursery.start_soon(other.submit_all, [request(1)] * 300)
            await until(lambda: replica.engine.waiting_tokens == 300)
            nursery.start_soon(engine.submit_all, [request(1)] * 100)
            await until(lambda: replica.engine.waiting_tokens == 400)
            expected = 4 if replica.by_tcp else 1  # API processes of one machine share what is admitted
            await until(lambda: engine._seconds_per_token()[0] == pytest.approx(expected * alone[0]))
            nursery.cancel_scope.cancel()


async def test_a_row_s_client_rank_and_deadline_reach_the_engine_process(replica):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        deadline = trio.current_time() + 60
        await engine.submit(replace(request(1), client=2**63 - 1, rank=-3, deadline=deadline))
        (received,) = replica.runner.batches[-1].requests
        assert (received.client, received.rank) == (2**63 - 1, -3)
        assert deadline <= received.deadline < deadline + 30
        with pytest.raises(DeadlineExceededError):
            await engine.submit(replace(request(1), deadline=trio.current_time()))


async def test_an_engine_that_stops_fails_the_requests_that_wait(replica):
    async with replica.live():
        engine = ProcessEngine([replica.connector], Metrics().of_engine("m"))
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


async def test_ending_the_engine_between_two_slices_of_a_delivery_fails_the_rest(replica):
    answered: list[int] = []
    failed: list[int] = []

    async with replica.live():
        engine = ProcessEngine([replica.connector], Metrics().of_engine("m"))

        async def one(token: int) -> None:
            try:
                await engine.submit(request(token))
                answered.append(token)
            except EngineDeadError:
                failed.append(token)

        async with trio.open_nursery() as waiters, trio.open_nursery() as nursery:
            running = await nursery.start(scoped, engine)
            await engine.wait_ready()
            replica.engine._budget = TokenBudget(10_000)
            replica.runner.gate.clear()
            waiters.start_soon(one, 0)
            await trio.to_thread.run_sync(replica.runner.launching.wait)
            for token in range(1, 500):
                waiters.start_soon(one, token)
            await until(lambda: replica.engine.statistics().queued_rows >= 498)
            replica.runner.gate.set()
            while len(answered) < 5:
                await trio.lowlevel.checkpoint()
            running.cancel()
    assert sorted(answered + failed) == list(range(500))
    assert failed


async def scoped(engine: ProcessEngine, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await engine.run()


async def test_cancelling_at_any_step_leaves_nothing_behind(replica):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
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


async def outcome_of(engine: ProcessEngine, asked: PoolingRequest) -> PoolingOutput | Exception:
    try:
        return await engine.submit(asked)
    except PoolServeError as error:
        return error


async def outcomes(engine: ProcessEngine, *asked: PoolingRequest) -> list[PoolingOutput | Exception]:
    """Have rows of as many requests computed at the same time; they go in one frame."""
    found: dict[int, PoolingOutput | Exception] = {}

    async def one(index: int) -> None:
        found[index] = await outcome_of(engine, asked[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(asked)):
            nursery.start_soon(one, index)
    return [found[index] for index in range(len(asked))]


@pytest.mark.parametrize(
    "wrong",
    [
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), (Unsendable(),)),
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), EMBED, priority=2**64),
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), ("embed",)),
        PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32)), (Embed(dimensions="many"),)),
    ],
    ids=["an object", "a priority of 65 bits", "no params", "a field of another type"],
)
async def test_a_row_that_cannot_be_sent_or_read_fails_alone(replica, wrong):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        hello = engine._links[0].hello
        first, failed, last = await outcomes(engine, request(5), wrong, request(6))
        assert isinstance(failed, UnsendableError)
        assert [first.values[0][1], last.values[0][1]] == [5, 6]
        assert engine.statistics().queued_rows == engine.statistics().queued_tokens == 0
        assert engine._links[0].hello is hello, "it is the same connection"


async def test_a_value_that_cannot_be_sent_fails_its_row_alone(replica):
    def values(batch):
        return CopiedBatch([({"no": "array"} if row.tokens == 2 else np.ones(1),) for row in batch.requests])

    replica.runner.on_launch = values
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        first, failed, last = await outcomes(engine, request(5), request(6, 6), request(7))
        assert isinstance(failed, UnsendableError)
        assert first.values[0].tolist() == last.values[0].tolist() == [1]


async def test_a_batch_with_too_few_answers_fails_alone(replica):
    replica.runner.on_launch = lambda batch: CopiedBatch([]) if batch.requests[0].tokens == 2 else None
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        assert isinstance(await outcome_of(engine, request(6, 6)), BatchFailedError)
        assert (await engine.submit(request(5))).values[0][1] == 5


def frame_of(message: object, payload: bytes = b"") -> bytes:
    header = msgspec.msgpack.encode(message)
    return struct.pack("<IQ", len(header), len(payload)) + header + payload


GARBAGE = {
    "noise": b"\xc1" * 100,
    "a header that is too long": struct.pack("<IQ", 2**32 - 1, 0) + b"x",
    "a payload that is too long": struct.pack("<IQ", 1, 2**64 - 1) + b"x",
    "a large payload that never comes": struct.pack("<IQ", 1, 4 * 2**30) + b"x",
    "no message": frame_of({"a": 1}),
    "an unknown message": frame_of(["Explode", 5]),
    "a message of other fields": frame_of(["Submit", "rows"]),
    "very deep": struct.pack("<IQ", 50_000, 0) + b"\x91" * 50_000,
    "a part with fewer than no bytes": frame_of(["Submit", [[[1], -5, []]]]),
    "a part without numbers": frame_of(["Submit", [[1, 0, []]]]),
    "a number of 64 bits": frame_of(["Withdraw", [2**64 - 1]]),
    "half a frame": frame_of(["Withdraw", [1]])[:-1],
    "a scope that was never opened": frame_of(["CloseScope", 77]),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_connection_that_sends_garbage_ends_alone(replica, garbage):
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        hello = engine._links[0].hello
        async with (await replica.connect()).stream as stream:
            await stream.send_all(garbage)
            await stream.send_eof()
            with trio.fail_after(10):
                while await stream.receive_some():
                    """The greeting, and the end."""
        assert (await engine.submit(request(5))).values[0][1] == 5
        assert engine._links[0].hello is hello


async def test_rows_that_cannot_be_read_are_answered_by_number(replica):
    async with replica.live():
        stream = await replica.connect()
        assert isinstance((await stream.receive())[0], Hello)
        (frame,) = row_frames([(1, request(5)), (3, request(6)), (3, request(7))], pytest.fail)
        frame.add([2, 4], Rows([1, 1], [("nowhere:Nothing", {})], *COLUMNS), [b"\0" * 8])
        frame.add([5], Rows([1], [("nowhere:Nothing", {})], *COLUMNS))
        await stream.send(Submit(frame.parts), frame.buffers)
        found: dict[int, type] = {}
        while len(found) < 5:
            message, behind = await stream.receive()
            for part, payload in parts_of(message.parts, behind):
                answers = read_answers(part, payload)
                kind = type(answers) if isinstance(answers, Exception) else type(answers[0])
                found.update(dict.fromkeys(part.ids, kind))
        assert {number for number, kind in found.items() if kind is UnsendableError} == {2, 4, 5}
        assert {number for number, kind in found.items() if kind is PoolingOutput} == {1, 3}
        await stream.aclose()
        await until(lambda: not replica.engine.statistics().queued_rows)
        async with asking(replica) as engine:
            await engine.wait_ready()
            assert (await engine.submit(request(5))).values[0][1] == 5, "a number that is used twice ends nothing"


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_an_engine_that_sends_garbage_loses_its_own_connection_alone(make, garbage):
    good, bad = make(0), make(1)
    connections = 0

    async def break_connections() -> None:
        nonlocal connections
        while True:
            stream = await bad.accept()
            connections += 1
            async with stream:
                await stream.send_all(frame_of(Hello(8, 0, 2048)) + garbage)

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(break_connections)
        await until(lambda: connections >= 2)
        await until(lambda: engine._links[0].hello is not None)
        for _ in range(5):
            found = await outcomes(engine, request(5), request(5), request(5))
            for outcome in found:
                assert isinstance(outcome, EngineDeadError) or outcome.values[0][1] == 5
        await until(lambda: engine._links[1].hello is None)
        assert (await engine.submit(request(5))).values[0][1] == 5
        nursery.cancel_scope.cancel()


async def test_rows_of_more_than_one_frame_are_all_computed(replica, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.engine.remote.wire.FULL_FRAME_ROWS", 7)
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        outputs = await engine.submit_all([request(index) for index in range(50)])
        assert [output.values[0][1] for output in outputs] == list(range(50))


async def compute_window(engine: ProcessEngine, *of_members: list[PoolingRequest]) -> list[list[object] | Exception]:
    """Return the lengths that each member of a window is given for its rows, or its error."""
    window = PlannedWindow(len(of_members))
    results: list[list[object] | Exception] = [[] for _ in of_members]

    async def submit(index: int) -> None:
        try:
            with window.members[index] as member:
                outputs = await member.submit_all(engine, of_members[index])
        except PoolServeError as error:
            results[index] = error
        else:
            results[index] = [output.values[0][0] for output in outputs]

    async with trio.open_nursery() as nursery:
        for index in range(len(of_members)):
            nursery.start_soon(submit, index)
    return results


async def test_all_rows_of_a_planned_batch_go_to_one_replica(make):
    replicas = [make(number) for number in range(2)]
    rows = [[request(*range(1, 2 + length)) for length in range(1 + index % 7)] for index in range(20)]
    async with two_alive(*replicas), asking(*replicas) as engine:
        await until(lambda: len(engine._routing.ready) == 2)
        results = await compute_window(engine, *rows)
    assert results == [[each.tokens for each in of_member] for of_member in rows]
    assert all(replica.runner.batches for replica in replicas)
    for batch in [batch for replica in replicas for batch in replica.runner.batches]:
        (planned,) = {each.planned for each in batch.requests}
        assert planned is not None
        assert planned.rows == len(batch.requests)


async def test_background_work_is_shared_between_replicas_and_other_rows_are_not_refused_for_it(make):
    replicas = [make(number) for number in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine._routing.ready) == 2)
        await engine.submit_all([request(1)] * 2000)  # many batches: most leave some waiting, so the rates are known
        await until(lambda: not np.isnan(engine._seconds_per_token()[0]))
        for replica in replicas:
            replica.runner.gate.clear()
        nursery.start_soon(compute_window, engine, [request(*range(1, 17)) for _ in range(10_000)])
        await until(lambda: sum(link.background_tokens for link in engine._links) == 160_000)
        assert min(link.background_tokens for link in engine._links) > 20_000, "each as it is fast"
        assert [link.own_tokens for link in engine._links] == [0, 0]
        with engine.admit(EstimatedWork(tokens=5)), engine.admit(EstimatedWork(tokens=5)):
            assert engine._admission.waiting_s < 1
        nursery.cancel_scope.cancel()
    assert [link.background_tokens for link in engine._links] == [0, 0]


async def test_background_work_with_a_held_query_goes_where_the_query_is(make):
    replicas = [make(number) for number in range(2)]
    async with two_alive(*replicas), asking(*replicas) as engine, trio.open_nursery() as nursery:
        await until(lambda: len(engine._routing.ready) == 2)
        for replica in replicas:
            replica.runner.gate.clear()
        nursery.start_soon(compute_window, engine, [request(*range(1, 17))])
        await until(lambda: any(link.background_tokens for link in engine._links))
        with engine.open_scope() as scope:
            (holder,) = [link for link in engine._links if scope in link.scopes]
            assert holder.background_tokens, "the other one has less background work"
            nursery.start_soon(compute_window, engine, [request(5, params=(HoldQuery(HeldQuery(scope)),))])
            await until(lambda: sum(link.background_tokens for link in engine._links) == 17)
            assert holder.background_tokens == 17
            nursery.cancel_scope.cancel()


async def test_a_planned_batch_with_a_row_that_cannot_be_sent_fails_and_no_other(replica):
    """The engine process would wait for its last row for ever."""
    unsendable = PoolingRequest(RenderedPrompt(np.ones(4, dtype=np.int32)), (Unsendable(),))
    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        results = await compute_window(engine, [unsendable], [request(1, 2, 3, 4)], [request(1)])
        assert isinstance(results[0], UnsendableError)
        assert isinstance(results[1], BatchFailedError) or results[1] == [4]
        assert await compute_window(engine, [request(1, 2)]) == [[2]]
        assert [link.waiting_rows for link in engine._links] == [0]


async def test_a_planned_row_withdrawn_before_it_is_sent_is_computed_with_its_batch(replica):
    window = PlannedWindow(2)
    scope = trio.CancelScope()
    computed: list[int] = []

    async def submit(index: int) -> None:
        with window.members[index] as member:
            outputs = await member.submit_all(engine, [request(1, 2, 3)])
            computed.append(outputs[0].values[0][0])

    async with replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        async with trio.open_nursery() as nursery:
            with scope, window.members[1] as member:
                nursery.start_soon(submit, 0)
                await wait_all_tasks_blocked()
                # Planned in this step, and cancelled before the link's task runs.
                scope.cancel()
                await member.submit_all(engine, [request(7, 8, 9)])
    assert computed == [3]
    assert [len(batch.requests) for batch in replica.runner.batches] == [2]

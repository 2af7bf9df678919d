"""A device server and the API processes that share it: credits, joined batches, and what is told of the others."""

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from attrs import define, field

from tests.engine.remote.replicas import Replica, asking, request, until
from tests.engine.remote.test_wire import types_of
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.batching import TokenBudget
from trio_pool_serve.engine.remote.parts import row_frames
from trio_pool_serve.engine.remote.wire import (
    CREDITS,
    Answers,
    BatchFacts,
    FromEngine,
    Hello,
    QueueState,
    Submit,
)
from trio_pool_serve.errors import BatchFailedError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput, PoolingRequest

POISON = 666


@define(eq=False)
class ApiProcess:
    """An API process that sends what a test wants it to."""

    stream: FramedStream[FromEngine]
    told: Answers | None = field(init=False, default=None)
    """What it was told last."""
    answers: dict[int, type] = field(init=False, factory=dict)
    """Of which type the answer to each row is."""
    done: list[int] = field(init=False, factory=list)
    """Batches all rows of which were answered."""
    _numbers: itertools.count = field(init=False, factory=itertools.count)

    async def send(self, *rows: PoolingRequest, **about) -> list[int]:
        """Send a batch; return the numbers of its rows, the first of which is the batch's as well."""
        numbered = [(next(self._numbers), row) for row in rows]
        facts = BatchFacts(numbered[0][0], len(rows), **about)
        for frame in row_frames(numbered, pytest.fail):
            await self.stream.send(Submit(frame.parts, facts), frame.buffers)
        return [number for number, _ in numbered]

    async def receive(self) -> None:
        while (received := await self.stream.receive()) is not None:
            message, frame_payload = received
            if isinstance(message, Hello):
                continue
            self.answers.update(types_of(message.parts, frame_payload))
            self.done += [done.batch for done in message.done]
            self.told = message


@asynccontextmanager
async def processes(replica: Replica, count: int) -> AsyncIterator[list[ApiProcess]]:
    """Connect API processes; wait until all know that the others are there."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            stream = await replica.connect()
            stack.push_async_callback(stream.aclose)
            found.append(ApiProcess(stream))
        async with trio.open_nursery() as nursery:
            for process in found:
                nursery.start_soon(process.receive)
            await until(lambda: all(process.told is not None for process in found))
            yield found
            nursery.cancel_scope.cancel()


@pytest.fixture
async def replica(make) -> AsyncIterator[Replica]:
    replica = make()
    async with replica.listen(), replica.live():
        replica.engine.worker.budget = TokenBudget(10_000)
        yield replica


async def occupy(replica: Replica, process: ApiProcess) -> list[int]:
    """Have a batch computed until the gate is opened."""
    replica.runner.gate.clear()
    before = len(replica.runner.batches)
    numbers = await process.send(request(1))
    await until(lambda: len(replica.runner.batches) > before)
    return numbers


# -- credits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launches", [1, 2])
async def test_there_are_no_more_batches_of_an_api_process_than_it_has_credits(make, launches):
    replica = make(runner=ScriptedRunner(concurrent_launches=launches))
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        replica.engine.worker.budget = TokenBudget(16)
        await until(lambda: len(replica.engine.connections) == 1)
        (connection,) = replica.engine.connections
        at_a_time = set()
        async with processes(replica, 1):
            replica.runner.on_launch = lambda _: at_a_time.add(len(connection.batches))
            await engine.submit_all([request(5)] * 500)
        assert launches < max(at_a_time) <= CREDITS * launches


async def test_a_connection_that_is_cut_leaves_no_row_and_no_credit_behind(replica):
    async with asking(replica) as engine:
        async with processes(replica, 1) as (cut,):
            await engine.submit(request(5))
            (answered,) = await cut.send(request(5))
            await until(lambda: cut.done == [answered])
            await occupy(replica, cut)
            await cut.send(request(5), request(6, 6))
            await until(lambda: replica.engine.joiner.tokens == 3)
        await until(lambda: len(replica.engine.connections) == 1)
        assert (replica.engine.joiner.tokens, len(replica.engine.joiner)) == (0, 0)
        replica.runner.gate.set()
        before = len(replica.runner.batches)
        await engine.submit(request(7))
        assert engine.worker.links[0].room == CREDITS
        assert len(replica.runner.batches) == before + 1
        assert not len(replica.engine.worker.dispatcher.in_flight)


# -- joined batches --------------------------------------------------------------------------------------


async def test_a_row_that_fails_in_a_joined_batch_fails_alone_and_costs_the_other_process_one_pass(replica):
    def fail(batch) -> None:
        if any(POISON in row.prompt.token_ids for row in batch.requests):
            raise ValueError("poison")

    replica.runner.on_launch = fail
    async with processes(replica, 2) as (guilty, other):
        await occupy(replica, guilty)
        poisoned = await guilty.send(*[request(POISON if index == 3 else 5) for index in range(8)])
        await other.send(*[request(7)] * 8)
        await until(lambda: len(replica.engine.joiner) == 16)
        replica.runner.gate.set()
        await until(lambda: len(guilty.answers) == 9 and len(other.answers) == 8)
        failed = [number for number, kind in guilty.answers.items() if kind is BatchFailedError]
        assert failed == [poisoned[3]]
        assert {*other.answers.values()} == {PoolingOutput}
        with_other = [batch for batch in replica.runner.batches if batch.requests[-1].prompt.token_ids[0] == 7]
        assert [len(batch.requests) for batch in with_other] == [16, 8]


# -- what is told of the others --------------------------------------------------------------------------


async def test_each_is_told_how_much_others_compute_while_its_rows_wait(replica):
    async with processes(replica, 3) as (much, little, none):
        replica.runner.gate.clear()
        await much.send(request(5), queue=QueueState(80_000, 2))
        await little.send(request(5), queue=QueueState(20_000))
        await until(lambda: sum(each.queue.tokens for each in replica.engine.connections) == 100_000)
        replica.runner.gate.set()
        for process in (much, little, none):
            state = {much: QueueState(80_000, 2), little: QueueState(20_000), none: QueueState()}[process]
            await process.send(request(5), queue=state)
        await until(lambda: len(much.done) == len(little.done) == 2 and len(none.done) == 1)
        # A turn for each client, and meanwhile as much again may arrive as waits.
        assert [each.told.others_share for each in (much, little, none)] == [0.5, 2, 3]


async def test_a_process_whose_rows_are_all_answered_has_no_share(replica):
    async with processes(replica, 2) as (idle, busy):
        await idle.send(request(5), queue=QueueState(1000, 5))
        await until(lambda: idle.done)
        await busy.send(request(5), queue=QueueState(1000))
        await until(lambda: busy.done)
        assert busy.told.others_share == 0


async def test_each_is_told_what_is_computed_for_others(replica):
    async with processes(replica, 2) as (first, second):
        await first.send(request(5, 5), queue=QueueState(small_requests=1))
        await until(lambda: first.done)
        await second.send(request(5, 5, 5), queue=QueueState(small_requests=2))
        await until(lambda: second.done)
        await first.send(request(5), queue=QueueState(small_requests=1))
        await until(lambda: len(first.done) == 2)
        assert (first.told.computed_tokens, second.told.computed_tokens) == (6, 5)
        assert (first.told.others_small_requests, second.told.others_small_requests) == (2, 1)

"""Rows of engines that are lost: which are computed elsewhere."""

import math

import trio
from msgspec.structs import replace

from tests.engine.remote.replicas import Replica, asking
from tests.engine.remote.test_process_engine import outcome_of, request, until
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.types import HeldQuery, HoldQuery, PoolingOutput, PoolingRequest


def alone(token: int, **fields) -> PoolingRequest:
    """Return a row that is all that its client has asked for."""
    return replace(request(token, **fields), is_alone=True)


async def lost_row(make, asked, *, until_s: float = -math.inf) -> tuple[object, Replica]:
    """Have a row be at an engine that ends, not before ``until_s``; return its outcome, and the engine that is left.

    ``asked`` is the row, or makes it of a scope of that engine.
    """
    first, second = make(0), make(1)
    outcomes = []

    async def ask(engine) -> None:
        with engine.open_scope() as scope:
            outcomes.append(await outcome_of(engine, asked(scope) if callable(asked) else asked))

    async with (
        first.listen(),
        second.listen(),
        second.live(),
        asking(first, second) as engine,
        trio.open_nursery() as nursery,
    ):
        async with first.live():
            await until(lambda: len(engine._routing.ready) == 2)
            first.runner.gate.clear()
            nursery.start_soon(ask, engine)
            await until(lambda: first.engine.statistics().in_flight_batches)
            await trio.sleep_until(until_s)
        await until(lambda: outcomes)
    return outcomes[0], second


async def test_a_single_row_of_an_engine_that_is_lost_is_computed_elsewhere(make):
    outcome, second = await lost_row(make, alone(5))
    assert isinstance(outcome, PoolingOutput)
    assert sum(second.runner.rows) == 1


async def test_a_row_whose_deadline_has_passed_is_not_computed_elsewhere(make):
    deadline = trio.current_time() + 0.5
    outcome, second = await lost_row(make, replace(alone(5), deadline=deadline), until_s=deadline)
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


async def test_a_row_of_a_larger_request_is_not_computed_elsewhere(make):
    """Though it is submitted by itself, as the last text of seventeen is: the others have failed."""
    outcome, second = await lost_row(make, request(5))
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


async def test_a_row_is_sent_again_once(make):
    """A row that ends its engine must not end all of them."""
    replicas = [make(number) for number in range(3)]
    ends = [trio.Event() for _ in replicas]
    outcomes = []

    async def live(replica: Replica, end: trio.Event) -> None:
        async with replica.live():
            await end.wait()

    async def ask(engine) -> None:
        outcomes.append(await outcome_of(engine, alone(5)))

    async with replicas[0].listen(), replicas[1].listen(), replicas[2].listen(), trio.open_nursery() as nursery:
        for replica, end in zip(replicas, ends, strict=True):
            replica.runner.gate.clear()
            nursery.start_soon(live, replica, end)
        async with asking(*replicas) as engine:
            await until(lambda: len(engine._routing.ready) == 3)
            nursery.start_soon(ask, engine)
            for count in (2, 1):
                await until(lambda: any(link.waiting_rows for link in engine._links))
                (holder,) = [link for link in engine._links if link.waiting_rows]
                ends[engine._links.index(holder)].set()
                await until(lambda count=count: len(engine._routing.ready) == count)
            await until(lambda: outcomes)
            assert isinstance(outcomes[0], EngineProcessDiedError)
            assert sum(link.waiting_rows for link in engine._links) == 0
            assert sum(sum(replica.runner.rows) for replica in replicas) <= 2
        for end in ends:
            end.set()


async def test_a_held_query_s_row_is_not_sent_elsewhere(make):
    outcome, second = await lost_row(make, lambda scope: alone(5, params=(HoldQuery(HeldQuery(scope)),)))
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0

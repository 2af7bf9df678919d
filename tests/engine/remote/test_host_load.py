"""What hosts tell of their load, in routing and in admission."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
import trio

from tests.engine.remote.replicas import Replica, asking
from tests.engine.remote.test_process_engine import frame_of, request, until
from trio_pool_serve.engine.admission import LOAD_MARGIN, EstimatedWork
from trio_pool_serve.engine.compute_rates import UNKNOWN, WORK_CLASSES
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.engine.remote.wire import (
    Answers,
    Hello,
)
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.types import Embed


async def test_the_rates_that_an_engine_has_measured_decide_how_much_it_gets(make):
    """A slow machine gets less: here a quarter."""
    fast, slow = make(0), make(1)
    async with fast.listen(), slow.listen(), asking(fast, slow) as engine, trio.open_nursery() as nursery:

        async def say(replica: Replica, seconds_per_token: float) -> None:
            async with await replica.accept() as stream:
                rates = np.full(WORK_CLASSES, seconds_per_token).tobytes()
                await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(Answers([], 0, 0.0, rates)))
                while await stream.receive_some():
                    """It computes nothing."""

        nursery.start_soon(say, fast, 0.001)
        nursery.start_soon(say, slow, 0.004)
        await until(lambda: len([link for link in engine._links if link.seconds_per_token is not UNKNOWN]) == 2)
        nursery.start_soon(engine.submit_all, [request(1, 2, params=(Embed(),)) for _ in range(500)])
        await until(lambda: sum(link.waiting_rows for link in engine._links) == 500)
        assert [link.waiting_rows for link in engine._links] == [400, 100]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def telling(*replicas: Replica, waiting: Sequence[int]) -> AsyncIterator[ProcessEngine]:
    """Links to engines that compute nothing: each needs a millisecond for a token, and tells how many wait there."""

    async def tell(replica: Replica, tokens: int) -> None:
        async with await replica.accept() as stream:
            rates = np.full(WORK_CLASSES, 1e-3).tobytes()
            await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(Answers([], tokens, 0.0, rates)))
            while await stream.receive_some():
                """It computes nothing."""

    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.listen())
        engine = await stack.enter_async_context(asking(*replicas))
        async with trio.open_nursery() as nursery:
            for replica, tokens in zip(replicas, waiting, strict=True):
                nursery.start_soon(tell, replica, tokens)
            await until(lambda: all(link.seconds_per_token is not UNKNOWN for link in engine._links))
            yield engine
            nursery.cancel_scope.cancel()


async def test_a_host_with_far_more_than_the_others_has_no_request_refused(make):
    """Rows go to the others. It may be one that says so only."""
    async with telling(*map(make, range(4)), waiting=(0, 10, 0, 2**40)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine._admission.waiting_s == pytest.approx(LOAD_MARGIN * 5e-3 / 4)
            engine.refuse_late(EstimatedWork(tokens=5))


async def test_what_waits_at_all_hosts_has_requests_refused(make):
    async with telling(*map(make, range(4)), waiting=(9000, 10_000, 11_000, 10_000)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine._admission.waiting_s == pytest.approx(LOAD_MARGIN * 10, rel=1e-2)
            with pytest.raises(OverloadedError):
                engine.refuse_late(EstimatedWork(tokens=5))


async def test_hosts_that_get_no_rows_count_as_no_capacity(make):
    async with telling(*map(make, range(4)), waiting=(0, 0, 0, 0)) as engine:
        assert engine._seconds_per_token()[0] == pytest.approx(1e-3 / 4)
        for link in engine._links[:3]:
            link.is_draining = True
        await until(lambda: engine._seconds_per_token()[0] == pytest.approx(1e-3))


async def test_a_drained_host_does_not_hide_that_all_others_stall(make):
    async with telling(*map(make, range(2)), waiting=(0, 0)) as engine:
        engine._links[0].is_draining = True
        assert engine.state == "ready"
        engine._links[1]._stall_reason = "a batch does not come back"
        assert engine.state == "stalled"

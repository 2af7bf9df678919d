"""What device servers tell of other API processes' work, in admission."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
import trio

from tests.engine.remote.replicas import Replica, asking
from tests.engine.remote.test_remote_engine import frame_of, until
from trio_pool_serve.engine.admission import LOAD_MARGIN, EstimatedWork
from trio_pool_serve.engine.compute_rates import WORK_CLASSES
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote.wire import Answers, Hello
from trio_pool_serve.errors import OverloadedError


@asynccontextmanager
async def telling(*replicas: Replica, shares: Sequence[float], stalled: Sequence[int] = ()) -> AsyncIterator[Engine]:
    """Devices that compute nothing and tell what share others have; together a millisecond for a token."""

    async def tell(replica: Replica, share: float, stall_reason: str) -> None:
        async with await replica.accept() as stream:
            answers = Answers([], [], 2048, others_share=share, stall_reason=stall_reason)
            await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(answers))
            while await stream.receive_some():
                """It computes nothing."""

    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.listen())
        engine = await stack.enter_async_context(asking(*replicas))
        engine.dispatcher.rates.seconds_per_token = np.full(WORK_CLASSES, 1e-3)
        async with trio.open_nursery() as nursery:
            for number, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
                nursery.start_soon(tell, replica, share, "a batch does not come back" if number in stalled else "")
            await until(lambda: all(device.told is not None for device in engine.worker.links))
            yield engine
            nursery.cancel_scope.cancel()


async def test_what_others_have_waiting_at_all_devices_slows_this_process_down(make):
    async with telling(*map(make, range(4)), shares=[1.0] * 4) as engine:
        with engine.admit(EstimatedWork(tokens=4000)):
            assert engine.admission.waiting_s == pytest.approx(LOAD_MARGIN * 8)
            with pytest.raises(OverloadedError):
                engine.refuse_late(EstimatedWork(tokens=4000))


async def test_a_device_at_which_others_have_far_more_has_no_request_refused(make):
    """Rows go to the others. It may be one that says so only."""
    async with telling(*map(make, range(4)), shares=(0.0, 2.0, 0.0, 1e6)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine.admission.waiting_s < LOAD_MARGIN * 5e-3 * 2
            engine.refuse_late(EstimatedWork(tokens=5))


async def test_a_drained_device_does_not_hide_that_all_others_stall(make):
    async with telling(*map(make, range(2)), shares=(0.0, 0.0), stalled=(1,)) as engine:
        assert engine.state == "ready"
        engine.worker.links[0].is_draining = True
        assert engine.state == "stalled"

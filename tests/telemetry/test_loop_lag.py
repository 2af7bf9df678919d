import pytest
import trio
from prometheus_client import CollectorRegistry, Histogram
from trio.testing import MockClock

from trio_pool_serve.telemetry.metrics import sample_loop_lag

pytestmark = pytest.mark.unit


async def test_the_lag_is_what_a_sleeper_wakes_too_late(mock_clock: MockClock):
    histogram = Histogram("lag", "lag", registry=CollectorRegistry(), buckets=(0.1, 1.0, 10.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: sample_loop_lag(histogram, every_s=1.0))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert histogram._sum.get() == pytest.approx(0)
        mock_clock.jump(6.0)
        await trio.testing.wait_all_tasks_blocked()
        assert histogram._sum.get() == pytest.approx(5.0)
        nursery.cancel_scope.cancel()

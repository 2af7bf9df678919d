import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_pool_serve.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineLoadingError,
    InvalidRequestError,
    OverloadedError,
)
from trio_pool_serve.telemetry.metrics import REFUSALS, SECONDS, Metrics, sample_loop_lag
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import PoolingOutput

pytestmark = pytest.mark.unit

AMOUNTS = st.lists(st.sampled_from([*SECONDS, 0.0, 100.0]) | st.floats(0, 100))


@given(AMOUNTS)
def test_many_observations_at_once_count_as_each_by_itself(amounts):
    together, apart = Metrics(), Metrics()
    together.of_engine("m").queue.observe_all(amounts)
    queue = apart.of_engine("m").queue
    for amount in amounts:
        queue.observe(amount)

    def samples(metrics: Metrics) -> dict[str, float]:
        return {
            f"{sample.name} {sample.labels}": sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if "queue_seconds" in sample.name and "created" not in sample.name
        }

    assert samples(together) == pytest.approx(samples(apart))
    assert samples(apart)["trio_pool_serve_queue_seconds_count {'model': 'm'}"] == len(amounts)


def test_refusals_are_counted_by_their_reason_and_other_failures_are_not():
    metrics = Metrics()
    for error in (
        OverloadedError("full", retry_after_s=1),
        OverloadedError("full", retry_after_s=1, reason="memory"),
        OverloadedError("used up", retry_after_s=1, reason="api_key"),
        EngineLoadingError("loading"),
        DrainingError("draining"),
        EngineDeadError("dead"),
        InvalidRequestError("wrong"),
        DeadlineExceededError("late"),
        ValueError("a bug"),
    ):
        metrics.count_failure(error)
    values = {
        (sample.name.removeprefix("trio_pool_serve_"), sample.labels.get("of")): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    assert {of: values["refusals_total", of] for of in REFUSALS} == dict.fromkeys(REFUSALS, 1)
    assert values["request_failures_total", None] == 9


async def test_the_loop_lag_is_how_late_a_sleeper_wakes(mock_clock: MockClock):
    histogram = Histogram("lag", "lag", registry=CollectorRegistry(), buckets=(0.1, 1.0, 10.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: sample_loop_lag(histogram, every_s=1.0))
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert histogram._sum.get() == pytest.approx(0)
        mock_clock.jump(6.0)
        await wait_all_tasks_blocked()
        assert histogram._sum.get() == pytest.approx(5.0)
        nursery.cancel_scope.cancel()


def test_rows_overlap_so_the_slowest_of_each_stage_counts():
    timings = RequestTimings()
    timings.add_rows([PoolingOutput((), 0.001, 0.004, 0.0), PoolingOutput((), 0.003, 0.002, 0.0005)])
    timings.render_s, timings.encode_s = 0.0025, 0.0001
    header = timings.server_timing()
    assert header.startswith(
        "render;dur=2.500, queue;dur=3.000, forward;dur=4.000, copy;dur=0.500, encode;dur=0.100, total;dur="
    )
    assert float(header.rsplit("=", 1)[1]) > 0

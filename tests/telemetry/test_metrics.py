import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_pool_serve.telemetry.metrics import SECONDS, Metrics

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

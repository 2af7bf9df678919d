"""How busy an engine is: a pure function of times and seconds."""

import pytest

from trio_pool_serve.engine.remote.busy_share import WINDOW_S, BusyShare, busy_seconds
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.telemetry.snapshots import Snapshot, families_of

pytestmark = pytest.mark.unit


def test_how_busy_an_engine_is_is_unknown_at_first_and_then_follows_the_last_seconds():
    busy = BusyShare()
    assert busy.share == 1.0
    for second in range(int(WINDOW_S)):
        busy.observe(second, 0.25 * second)
        assert busy.share == 1.0
    busy.observe(WINDOW_S, 0.25 * WINDOW_S)
    assert busy.share == pytest.approx(0.25)
    busy.observe(2 * WINDOW_S, 0.25 * WINDOW_S)
    assert busy.share == 0.0
    busy.observe(3 * WINDOW_S, 3 * WINDOW_S)  # a batch that took longer counts when it is done
    assert busy.share == 1.0
    busy.observe(3 * WINDOW_S, 99 * WINDOW_S)
    busy.observe(4 * WINDOW_S, 3.5 * WINDOW_S)
    assert busy.share == pytest.approx(0.5)


def test_the_seconds_are_those_of_the_engine_s_counter():
    metrics = Metrics()
    metrics.of_engine("m").busy.inc(2.5)
    assert busy_seconds(Snapshot(families_of(metrics.registry), {})) == 2.5
    assert busy_seconds(Snapshot([], {})) == 0.0

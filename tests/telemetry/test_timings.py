import pytest

from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import PoolingOutput

pytestmark = pytest.mark.unit


def test_rows_overlap_so_the_slowest_of_each_stage_counts():
    timings = RequestTimings()
    timings.add_rows([PoolingOutput((), 0.001, 0.004, 0.0), PoolingOutput((), 0.003, 0.002, 0.0005)])
    timings.render_s, timings.encode_s = 0.0025, 0.0001
    header = timings.server_timing()
    assert header.startswith(
        "render;dur=2.500, queue;dur=3.000, forward;dur=4.000, copy;dur=0.500, encode;dur=0.100, total;dur="
    )
    assert float(header.rsplit("=", 1)[1]) > 0

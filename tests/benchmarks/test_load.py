"""The load generators count what a server has answered, and how each request ended."""

import attrs
import pytest

from benchmarks.load import Load, LoadJob
from benchmarks.open_loop import OpenLoopJob, counts, merged, run_open_loop
from tests.load.raw_server import ANSWER, answering, raw_server
from trio_pool_serve.load.client_connection import CUT


async def test_every_answer_is_counted_once():
    async with raw_server(answering(ANSWER)) as server:
        job = LoadJob(port=server.port, bodies=["one", "two"], clients=3, seconds=0.2, ramp_s=0)
        result = await Load(job).run()
        answered = len(server.requests)
    assert result.requests == answered > 0
    assert answered - job.clients <= result.requests_per_s * job.seconds <= answered
    assert {request.partition(b"\r\n\r\n")[2] for request in server.requests} == {b"one", b"two"}
    assert 0 < result.p50_ms <= result.p95_ms <= result.p99_ms <= result.max_ms
    assert 0 < result.mean_ms <= result.max_ms


WITH_STATUS = b"HTTP/1.1 %s\r\ncontent-length: 2\r\n%s\r\nok"


@pytest.mark.parametrize(
    ("respond", "outcome"),
    [
        (answering(WITH_STATUS % (b"200 OK", b"")), "200"),
        (answering(WITH_STATUS % (b"429 Busy", b"Retry-After: 1\r\n")), "429"),
        (answering(b""), CUT),
    ],
    ids=["answered", "refused", "closed"],
)
async def test_each_request_is_counted_by_how_it_ended(respond, outcome):
    async with raw_server(respond) as server:
        job = OpenLoopJob(port=server.port, bodies=["{}"], per_s=50, seconds=0.2, timeout_s=0.5)
        result = await run_open_loop(job)
    assert counts(result) == {outcome: 10}
    assert result.offered == result.wanted == 10
    assert result.without_retry_after == 0
    assert result.goodput == (50 if outcome == "200" else 0)


async def test_a_refusal_without_retry_after_is_noticed():
    async with raw_server(answering(WITH_STATUS % (b"429 Busy", b""))) as server:
        result = await run_open_loop(OpenLoopJob(port=server.port, per_s=50, seconds=0.1))
    assert result.without_retry_after == 5
    again = attrs.evolve(result, outcomes={name: [*taken] for name, taken in result.outcomes.items()}, late_s=[])
    both = merged([result, again])
    assert both.without_retry_after == 10
    assert both.count("429") == 10

"""The load generator counts what a server has answered."""

import pytest

from benchmarks.load import Load, LoadJob, UnexpectedAnswerError, run_load
from tests.load.raw_server import ANSWER, answering, raw_server


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


async def test_a_generator_in_a_process_of_its_own_counts_the_same():
    async with raw_server(answering(ANSWER)) as server:
        result = await run_load(LoadJob(port=server.port, clients=2, seconds=0.2, ramp_s=0))
        assert result.requests == len(server.requests) > 0


async def test_no_more_is_asked_than_the_timetable_says():
    async with raw_server(answering(ANSWER)) as server:
        result = await Load(LoadJob(port=server.port, per_s=40, seconds=0.2, ramp_s=0)).run()
    assert 0 < result.requests == len(server.requests) <= 8


@pytest.mark.parametrize("answer", [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", b"not HTTP\r\n\r\n"])
async def test_a_failed_request_ends_the_load(answer: bytes):
    async with raw_server(answering(answer)) as server:
        with pytest.RaisesGroup(UnexpectedAnswerError, flatten_subgroups=True):
            await Load(LoadJob(port=server.port, seconds=60)).run()

"""Load that several processes send counts only if every answer is 200, and says whether they were the limit."""

import attrs
import pytest

from benchmarks.aim import Aim
from benchmarks.gpu import server_load
from benchmarks.gpu.generators import Generated, GeneratedLoad, RequestFailedError, divided, generate
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.server_load import Measured, ServerLoad
from benchmarks.gpu.settings import Settings
from benchmarks.load import LoadJob
from benchmarks.servers import Server
from tests.load.raw_server import ANSWER, answering, raw_server

PART = Generated(finished=10.0, seconds=2.0, cpu_s=0.2, began=5.0, ended=7.0, latencies_s=[0.1, 0.3])


async def test_all_processes_together_send_as_many_clients():
    async with raw_server(answering(ANSWER)) as server:
        job = LoadJob(port=server.port, bodies=["one", "two", "three"], clients=5, seconds=0.3, ramp_s=0)
        result = await generate(job, 2, within_s=60)
    assert result.requests == len(server.requests) > 0
    assert {request.partition(b"\r\n\r\n")[2] for request in server.requests} == {b"one", b"two", b"three"}
    assert len(result.cpu_shares) == 2
    assert all(0 < share <= 1.5 for share in result.cpu_shares)
    assert 0 < result.p50_ms <= result.p99_ms
    assert result.ended - result.began >= 0.3


async def test_an_answer_that_is_not_200_invalidates_the_load():
    async with raw_server(answering(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy")) as server:
        job = LoadJob(port=server.port, bodies=["one"], clients=4, seconds=30, ramp_s=0)
        with pytest.raises(RequestFailedError, match="UnexpectedAnswerError: 429: busy"):
            await generate(job, 2, within_s=60)


async def test_requests_without_an_answer_invalidate_the_load():
    async with raw_server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n...")) as server:
        with pytest.raises(RequestFailedError, match="not answered within 3 s"):
            await generate(LoadJob(port=server.port, bodies=["one"], seconds=0.1, ramp_s=0), 1, within_s=3)


def test_clients_are_divided_and_begin_with_different_bodies():
    jobs = divided(LoadJob(port=1, bodies=list("abcdef"), clients=8), 3)
    assert [job.clients for job in jobs] == [3, 3, 2]
    assert ["".join(job.bodies) for job in jobs] == ["abcdef", "cdefab", "efabcd"]
    assert [job.clients for job in divided(LoadJob(port=1, clients=2), 4)] == [1, 1]


def test_rates_add_up_and_quantiles_are_those_of_all_requests():
    other = attrs.evolve(PART, finished=30.0, latencies_s=[0.2, 0.9], began=4.0, cpu_s=1.0)
    merged = GeneratedLoad.merge([PART, other])
    assert merged.requests_per_s == 20.0
    assert (merged.requests, merged.p50_ms, merged.p99_ms) == (4, 200.0, 900.0)
    assert (merged.began, merged.ended, merged.cpu_shares) == (4.0, 7.0, [0.1, 0.5])
    assert not merged.is_saturated
    assert GeneratedLoad.merge([PART, attrs.evolve(PART, cpu_s=1.9)]).is_saturated


def test_no_answer_at_all_and_any_failure_invalidate_the_load():
    with pytest.raises(RequestFailedError, match="no request"):
        GeneratedLoad.merge([attrs.evolve(PART, latencies_s=[])])
    with pytest.raises(RequestFailedError, match=r"HTTP/1\.1 503"):
        GeneratedLoad.merge([PART, attrs.evolve(PART, failure="HTTP/1.1 503")])


FAST = Aim(row="fast", at_least=1e9)
LOAD = ServerLoad(aim=FAST, tokens=10, clients=2, texts=3, counts_tokens=True, note="published: more")


async def test_a_429_is_on_the_row_instead_of_a_value(tmp_path):
    settings = Settings(device="cpu", output_dir=tmp_path)
    subject = Subject(settings=settings, bert=tmp_path, splade=tmp_path)
    measured, findings = Measured(), Findings()
    measured.results[FAST] = [GeneratedLoad.merge([PART])]  # an earlier round does not count, either
    async with raw_server(answering(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")) as server:
        job = server_load.load_job(Server("a server", server.port), LOAD, "a model", 0.1)
        assert len(set(job.bodies)) == len(job.bodies) == server_load.DIFFERENT_TEXTS // LOAD.texts
        assert (job.clients, job.seconds) == (2, 0.1)
        assert await server_load._run(LOAD, job, measured, subject) is None
        answered = len(server.requests)
        assert await server_load._run(LOAD, job, measured, subject) is None, "it is left out from then on"
        assert len(server.requests) == answered
    server_load.judge([LOAD], measured, findings)
    assert findings.values[FAST] == (None, "invalid: UnexpectedAnswerError: 429")


def test_a_row_says_its_rate_and_whether_the_load_processes_were_saturated():
    measured, findings = Measured(), Findings()
    busy = attrs.evolve(PART, cpu_s=2.0)
    measured.results[FAST] = [GeneratedLoad.merge([part]) for part in (PART, busy, PART)]
    measured.busy[FAST] = [80.0, 90.0]
    server_load.judge([LOAD], measured, findings)
    assert findings.values[FAST] == (5.0 * 30, "published: more; the load processes were saturated")
    (table,) = findings.texts
    assert "| 10 tokens × 3, 2 clients | 5 | 150 | 100.0 | 300.0 | 85 % | 100% of a core |" in table
    assert len(findings.details["loads"][0]["rounds"]) == 3

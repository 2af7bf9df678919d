"""The load generator counts what a server has answered."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from attrs import define, field

from benchmarks.load import Load, LoadJob, UnexpectedAnswerError, run_load

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@define
class Counter:
    """A server that answers every request alike, and counts them."""

    answer: bytes = ANSWER
    answered: int = 0
    port: int = 0
    bodies: set[bytes] = field(factory=set)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):  # a client may leave at any time
                while request := bytes(await stream.receive_some()):
                    self.bodies.add(request.partition(b"\r\n\r\n")[2])
                    self.answered += 1
                    await stream.send_all(self.answer)


@asynccontextmanager
async def counting(answer: bytes = ANSWER) -> AsyncIterator[Counter]:
    counter = Counter(answer)
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(lambda task_status: serve_tcp(counter.serve, task_status))
        counter.port = listener.socket.getsockname()[1]
        yield counter
        nursery.cancel_scope.cancel()


async def serve_tcp(handler: Callable[[trio.SocketStream], Awaitable[None]], task_status: trio.TaskStatus) -> None:
    await trio.serve_tcp(handler, 0, host="127.0.0.1", task_status=task_status)


async def test_every_answer_is_counted_once():
    async with counting() as server:
        job = LoadJob(port=server.port, bodies=["one", "two"], clients=3, seconds=0.2, ramp_s=0)
        result = await Load(job).run()
    assert result.requests == server.answered > 0
    assert server.answered - job.clients <= result.requests_per_s * job.seconds <= server.answered
    assert server.bodies == {b"one", b"two"}
    assert 0 < result.p50_ms <= result.p95_ms <= result.p99_ms <= result.max_ms
    assert 0 < result.mean_ms <= result.max_ms


async def test_a_generator_in_a_process_of_its_own_counts_the_same():
    async with counting() as server:
        result = await run_load(LoadJob(port=server.port, clients=2, seconds=0.2, ramp_s=0))
        assert result.requests == server.answered > 0


async def test_no_more_is_asked_than_the_timetable_says():
    async with counting() as server:
        job = LoadJob(port=server.port, per_s=40, seconds=0.2, ramp_s=0)
        result = await Load(job).run()
    assert 0 < result.requests == server.answered <= 8


@pytest.mark.parametrize("answer", [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", b"not HTTP\r\n\r\n"])
async def test_a_failed_request_ends_the_load(answer: bytes):
    async with counting(answer) as server:
        with pytest.RaisesGroup(UnexpectedAnswerError, flatten_subgroups=True):
            await Load(LoadJob(port=server.port, seconds=60)).run()

"""Clients that leave, stall, pipeline or never stop sending, on real sockets."""

import math

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.api.serving import connect, until_launching
from tests.conftest import client_of, is_idle, listening, running, until
from trio_pool_serve.service import Service

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def post(body: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def queued(service: Service) -> int:
    return service.models.find().engine.statistics().queued_rows


HUNDRED_ROWS = b'{"input": [' + b",".join([b"[7]"] * 100) + b"]}"


@pytest.mark.parametrize("closes_its_sending_half", [False, True])
async def test_a_client_that_leaves_empties_the_queue_and_returns_every_permit(
    url, service, scripted, closes_its_sending_half
):
    scripted.gate.clear()
    stream = await connect(url)
    await stream.send_all(post(HUNDRED_ROWS))
    await until_launching(scripted)
    if closes_its_sending_half:
        await stream.send_eof()
        assert await stream.receive_some() == b"H"
    await until(lambda: queued(service) + sum(scripted.rows) == 100)
    await stream.aclose()
    await until(lambda: queued(service) == service.models.find().engine.statistics().admitted_tokens == 0)
    scripted.gate.set()
    await until(lambda: is_idle(service))
    assert len(scripted.batches) == 1  # what had been launched; the other rows never were
    assert sum(scripted.rows) < 100


async def test_a_client_that_leaves_while_its_texts_are_rendered_stops_the_rendering(url, service, scripted):
    stream = await connect(url)
    rendered_before = service.metrics.render._sum.get()
    await stream.send_all(post(b'{"input": [' + b",".join([b'"%s"' % (b"hello " * 60)] * 2000) + b"]}"))
    await until_launching(scripted)
    await stream.aclose()
    await until(lambda: queued(service) == service.models.find().engine.statistics().admitted_tokens == 0)
    assert service.metrics.render._sum.get() > rendered_before
    assert sum(scripted.rows) < 2000
    await until(lambda: is_idle(service))


async def answer_of(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(10):
        return b"".join([part async for part in stream])


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_closes_its_sending_half_gets_its_answer(url, service, scripted, version):
    scripted.gate.clear()
    async with await connect(url) as stream:
        await stream.send_all(post(b'{"input": [7]}').replace(b"HTTP/1.1", b"HTTP/" + version))
        await until_launching(scripted)
        await stream.send_eof()
        assert await stream.receive_some() == b"H"  # asks whether anyone listens
        scripted.gate.set()
        answer = b"H" + await answer_of(stream)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.lower()
    assert b"1.0,7.0,7.0,7.0" in body
    await until(lambda: is_idle(service))


async def test_pipelined_requests_are_answered_in_their_turn_also_after_the_end_of_sending(url, service):
    async with await connect(url) as stream:
        await stream.send_all(post(b'{"input": [7]}') + post(b'{"input": [8]}'))
        await stream.send_eof()
        answer = await answer_of(stream)
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP") == 2
    assert answer.index(b"1.0,7.0,7.0,7.0") < answer.index(b"1.0,8.0,8.0,8.0")
    await until(lambda: is_idle(service))


async def test_a_body_without_end_is_cut_off_and_leaves_no_task(config, scripted):
    hurried = attrs.evolve(config, time_limits=attrs.evolve(config.time_limits, client_timeout_s=0.5))
    async with running(Service(hurried, lambda *_: scripted)) as service, listening(service) as url:
        await wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        stream = await connect(url)
        with trio.fail_after(20), pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await stream.send_all(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
            while True:
                await stream.send_all(chunk)
        await stream.aclose()
        await until(lambda: trio.lowlevel.current_statistics().tasks_living == before)
        await until(lambda: is_idle(service))


async def test_many_clients_leaving_at_random_moments_leave_nothing(url, service, scripted):
    async def leave_after(moment: int) -> None:
        with trio.move_on_after(math.inf) as scope:
            async with client_of(url) as client, trio.open_nursery() as nursery:
                nursery.start_soon(lambda: client.post("/v1/embeddings", json={"input": ["hello"] * 50}))
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

    async with trio.open_nursery() as nursery:
        for moment in range(0, 600, 10):
            nursery.start_soon(leave_after, moment)
    await until(lambda: is_idle(service))
    async with client_of(url) as client:
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    await until(lambda: is_idle(service))


async def test_connections_are_closed_with_their_clients_also_if_these_pipeline_and_leave(url, service):
    await wait_all_tasks_blocked()
    before = trio.lowlevel.current_statistics().tasks_living

    async def come_and_go() -> None:
        for _ in range(100):
            async with await connect(url) as stream:
                await stream.send_all(post(b'{"input": [7]}'))
                while b"usage" not in await stream.receive_some():
                    continue

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(come_and_go)
    for body in (post(b'{"input": [7]}') * 2, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 2):
        for _ in range(20):
            async with await connect(url) as stream:
                await stream.send_all(body)
    await until(lambda: trio.lowlevel.current_statistics().tasks_living == before)
    await until(lambda: is_idle(service))


async def test_a_small_answer_arrives_in_one_piece(url):
    """Head and body are sent by one system call: no part of them can arrive alone."""
    async with await connect(url) as stream:
        for _ in range(50):
            await stream.send_all(post(b'{"input": "hello"}'))
            answer = bytes(await stream.receive_some(65536))
            begin, _, sent = answer.partition(b"\r\n\r\n")
            (length,) = (line.split(b":")[1] for line in begin.split(b"\r\n") if line.startswith(b"content-length"))
            assert len(sent) == int(length)

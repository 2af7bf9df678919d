"""Bodies: where they end, how large they may be, how long they may take."""

import json

import attrs
import pytest
import trio

from tests.conftest import client_of, listening, running, wait_idle
from trio_pool_serve.api.http.request_body import MAPPED_BYTES
from trio_pool_serve.service import Service

pytestmark = pytest.mark.unit

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LIMIT = 8 * 2**20


@pytest.fixture
def config(config):
    return attrs.evolve(config, network=attrs.evolve(config.network, max_body_bytes=LIMIT))


async def connect(url: str) -> trio.SocketStream:
    host, _, port = url.removeprefix("http://").partition(":")
    return await trio.open_tcp_stream(host, int(port))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def body_of(size: int) -> bytes:
    """A good request of exactly so many bytes."""
    return json.dumps({"input": "hello", "user": ""}).replace('""', f'"{"x" * (size - 30)}"').encode()


def test_the_bodies_have_their_sizes():
    assert len(body_of(1000)) == 1000


@pytest.mark.parametrize("size", [100, 20_000, MAPPED_BYTES, MAPPED_BYTES + 1, LIMIT - 1, LIMIT])
async def test_bodies_of_any_size_up_to_the_limit_are_read(client, service, size):
    """On the loop, in a thread, in small pages, in large ones."""
    answer = await client.post("/v1/embeddings", content=body_of(size), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    await wait_idle(service)


async def test_one_byte_more_is_413(client, service):
    answer = await client.post(
        "/v1/embeddings", content=body_of(LIMIT + 1), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    await wait_idle(service)


async def test_a_length_over_the_limit_is_413_though_not_a_byte_has_come(url, service):
    async with await connect(url) as stream:
        await stream.send_all(HEAD + f"Content-Length: {LIMIT + 1}\r\n\r\n".encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")
    await wait_idle(service)


@pytest.mark.parametrize("size", [1000, LIMIT])
async def test_a_body_in_chunks_is_read_up_to_the_limit(url, service, size):
    body = body_of(size)
    async with await connect(url) as stream:
        await stream.send_all(CHUNKED)
        for begin in range(0, size, 2**16):
            await stream.send_all(chunk(body[begin : begin + 2**16]))
        await stream.send_all(chunk(b""))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
    await wait_idle(service)


async def test_a_body_in_chunks_is_413_as_soon_as_it_passes_the_limit(url, service):
    async with await connect(url) as stream:
        await stream.send_all(CHUNKED)
        for _ in range(LIMIT // 2**20):
            await stream.send_all(chunk(bytes(2**20)))
        await stream.send_all(chunk(b"x"))  # and no end
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")
    await wait_idle(service)


@pytest.mark.parametrize("sent", [b"", b'{"input": '])
@pytest.mark.parametrize("length", [1000, MAPPED_BYTES + 1])
async def test_a_body_that_takes_too_long_is_408(config, scripted, sent, length):
    hurried = attrs.evolve(config, time_limits=attrs.evolve(config.time_limits, client_timeout_s=0.2))
    async with running(Service(hurried, lambda *_: scripted)) as service, listening(service) as url:
        async with await connect(url) as stream:
            await stream.send_all(HEAD + f"Content-Length: {length}\r\n\r\n".encode() + sent)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")
        async with client_of(url) as client:
            assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
        await wait_idle(service)

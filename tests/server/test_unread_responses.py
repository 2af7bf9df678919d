"""Responses that are computed and not read: what they hold, for how long, and what is left of them."""

import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import h2.events
import pytest
import trio

from tests.conftest import client_of, wait_idle
from tests.scripted_runner import ScriptedRunner
from tests.server.http2_client import Client
from tests.server.served_app import connect, served_app
from tests.server.server_process import until
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.app import create_app
from trio_pool_serve.server.listener import hypercorn_config
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import Connections
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.fan_out import RowToCompute

NUMBERS = 4096
TEXTS = 256
BODY = b'{"input":[' + b",".join(b'"a %d"' % index for index in range(TEXTS)) + b"]}"
RESPONSE_BYTES = TEXTS * NUMBERS * 4
"""At least: each number takes four characters."""

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def serving(service: Service, client_timeout_s: float) -> AsyncIterator[socket.socket]:
    """Serve as ``trio-pool-serve serve`` does, and give the socket that listens."""
    app, settings = create_app(service.config, service), hypercorn_config(service.config)
    connections, refusals = Connections(client_timeout_s=client_timeout_s), RefusalWriter(app.overload, settings)
    async with served_app(app, connections, settings, refusals=refusals) as listening:
        yield listening


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner(dimensions=NUMBERS)


SMALL = 4096
"""Bytes of a client's buffer: what it does not read stays in the server."""


async def test_a_response_counts_as_memory_until_it_has_been_read(service):
    async with serving(service, 60) as listening, await connect(listening, buffer=SMALL) as stream:
        await stream.send_all(HEAD % len(BODY) + BODY)
        await stream.receive_some(1)
        await until(lambda: service.memory.held_bytes > RESPONSE_BYTES)
        received = 0
        while service.memory.held_bytes:
            received += len(await stream.receive_some())
        assert received > RESPONSE_BYTES / 2
    await wait_idle(service)


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
async def test_a_client_that_reads_nothing_is_disconnected(service, protocol):
    async with serving(service, 0.2) as listening, await connect(listening, buffer=SMALL) as stream:
        if protocol == "HTTP/2":
            client = Client(stream, window=0)
            number = await client.post(BODY)
            assert (await client.event(h2.events.StreamReset)).stream_id == number
        else:
            await stream.send_all(HEAD % len(BODY) + BODY)
        engine = service.models.find().engine
        await until(lambda: engine.statistics().queued_rows == 0 and not service.memory.held_bytes)
        await wait_idle(service)


async def test_a_stream_that_is_not_read_ends_alone(service):
    small = b'{"input":"a","dimensions":8}'
    async with serving(service, 0.5) as listening, await connect(listening, buffer=SMALL) as stream:
        client = Client(stream, window=0)
        unread = await client.post(small)
        read = await client.post(small)
        client.protocol.increment_flow_control_window(2**20, stream_id=read)
        await client.send()
        assert (await client.event(h2.events.StreamEnded)).stream_id == read
        assert (await client.event(h2.events.StreamReset)).stream_id == unread
        again = await client.post(small)
        client.protocol.increment_flow_control_window(2**20, stream_id=again)
        await client.send()
        assert (await client.event(h2.events.StreamEnded)).stream_id == again


async def test_a_client_that_reads_slowly_is_served(service):
    async with serving(service, 0.5) as listening, await connect(listening, buffer=2**17) as stream:
        await stream.send_all(HEAD % len(BODY) + BODY)
        received, began = b"", trio.current_time()
        while not received.endswith(b"}}"):
            received += await stream.receive_some(2**17)
            await trio.sleep(0.02)
        assert len(received) > RESPONSE_BYTES
        assert trio.current_time() - began > 0.5


@pytest.mark.parametrize("leaves_while", ["it is computed", "it is sent"])
@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
async def test_a_client_that_leaves_leaves_nothing_to_the_garbage_collector(service, scripted, protocol, leaves_while):
    """What a request held is freed with its last reference: no cycle keeps it until all objects are looked through."""
    is_computed = leaves_while == "it is computed"
    async with serving(service, 60) as listening, await connect(listening, buffer=SMALL) as stream:
        client = Client(stream, window=0)
        if is_computed:
            scripted.gate.clear()
        with without_garbage_collection():
            if protocol == "HTTP/2":
                await client.post(BODY)
            else:
                await stream.send_all(HEAD % len(BODY) + BODY)
            if is_computed:
                await trio.to_thread.run_sync(scripted.launching.wait)
            elif protocol == "HTTP/2":
                await client.event(h2.events.ResponseReceived)
            else:
                await stream.receive_some(1)
            await stream.aclose()
            scripted.gate.set()
            await until(lambda: not service.memory.held_bytes)
            await wait_idle(service)
            await until(lambda: not living_requests())


@pytest.mark.parametrize(
    ("body", "timeout_s", "status"),
    [
        ({"input": 5}, 60, 400),
        ({"input": ["a"] * 20 + ["a " * 9000] * 3}, 60, 400),
        ({"input": "a"}, 0.05, 504),
    ],
    ids=["not decoded", "of a row", "deadline"],
)
async def test_an_error_leaves_nothing_to_the_garbage_collector(service, scripted, body, timeout_s, status):
    """An error's traceback refers to frames that refer to the request: nothing there refers to the error."""
    if timeout_s < 1:
        scripted.gate.clear()
    async with serving(service, 60) as listening, client_of(f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
        with without_garbage_collection():
            answer = await client.post("/v1/embeddings", json=body, headers={"X-Request-Timeout": f"{timeout_s}"})
            assert answer.status_code == status
            scripted.gate.set()
            await wait_idle(service)
            await until(lambda: not living_requests())


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living_requests() -> list[HttpRequest | RowToCompute]:
    return [each for each in gc.get_objects() if type(each) in {HttpRequest, RowToCompute}]


async def test_http2_has_as_many_headers_as_http1(service):
    async with serving(service, 60) as listening, await connect(listening, buffer=SMALL) as stream:
        client = Client(stream, window=2**16)
        number = await client.post(b'{"input":"a"}', *((f"x-{number}", "a") for number in range(101)))
        assert await client.status(number) == b"431"

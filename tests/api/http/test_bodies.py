"""Bodies: where they end, how large they may be, how long they may take, and how much there may be in them."""

import json

import attrs
import pytest
from hypothesis import given, strategies

from tests.api.serving import connect
from tests.conftest import client_of, listening, running, wait_idle
from trio_pool_serve.api.http.json_body import COUNTED_AT_ONCE, COUNTED_FROM, PER_INPUT, refuse_many_values
from trio_pool_serve.api.http.request_body import MAPPED_BYTES
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.service import Service

pytestmark = pytest.mark.unit

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LIMIT = 8 * 2**20


@pytest.fixture
def config(config):
    return attrs.evolve(config, network=attrs.evolve(config.network, max_body_bytes=LIMIT))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def body_of(size: int) -> bytes:
    """A good request of exactly so many bytes."""
    body = json.dumps({"input": "hello", "user": "x" * (size - 30)}).encode()
    assert len(body) == size
    return body


@pytest.mark.parametrize("size", [100, 20_000, MAPPED_BYTES, MAPPED_BYTES + 1, LIMIT - 1, LIMIT, LIMIT + 1])
async def test_bodies_of_any_size_up_to_the_limit_are_read(client, service, size):
    """On the loop, in a thread, in small pages, in large ones."""
    answer = await client.post("/v1/embeddings", content=body_of(size), headers={"Content-Type": "application/json"})
    assert answer.status_code == (413 if size > LIMIT else 200), answer.text
    await wait_idle(service)


async def test_a_length_over_the_limit_is_413_though_not_a_byte_has_come(url, service):
    async with await connect(url) as stream:
        await stream.send_all(HEAD + f"Content-Length: {LIMIT + 1}\r\n\r\n".encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")
    await wait_idle(service)


@pytest.mark.parametrize("size", [1000, LIMIT, LIMIT + 1])
async def test_a_body_in_chunks_is_read_up_to_the_limit_and_413_as_soon_as_it_passes_that(url, service, size):
    body = body_of(size)
    async with await connect(url) as stream:
        await stream.send_all(CHUNKED)
        for begin in range(0, size, 2**16):
            await stream.send_all(chunk(body[begin : begin + 2**16]))
        if size <= LIMIT:  # without its end, otherwise
            await stream.send_all(chunk(b""))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413" if size > LIMIT else b"HTTP/1.1 200")
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


# -- bodies that are cheap to send and dear to parse are refused before they are parsed -----------------------


def is_refused(body: str, inputs: int = 10) -> bool:
    """Whether the body is refused, with so much white space behind it that its values are counted."""
    try:
        refuse_many_values((body + " " * COUNTED_FROM).encode(), inputs, 1000)
    except InvalidRequestError as refusal:
        return f"the limit for {inputs} inputs" in str(refusal)
    return False


@pytest.mark.parametrize("values", [["a"] * 321, [[1]] * 320, [{}] * 320, [1] * 1002])
def test_as_many_values_as_may_be_there_are_read_and_one_more_is_refused(values):
    assert not is_refused(json.dumps(values[1:]))
    assert is_refused(json.dumps(values))


def test_short_bodies_are_left_to_the_parser():
    refuse_many_values(json.dumps([[1]] * 10_000).encode(), 10, 1000)


@given(strategies.lists(strategies.text(alphabet='ab\\",[{}é', max_size=20), max_size=60), strategies.integers(0, 40))
def test_texts_are_counted_exactly_wherever_the_pieces_end(texts, shift):
    # The first text moves the others across the end of a piece.
    padding = "x" * (COUNTED_AT_ONCE - 2 - shift)
    body = json.dumps([padding, *texts, ",[{" * 1001], ensure_ascii=False)
    count = len(texts) + 2
    most = count // PER_INPUT * PER_INPUT
    assert not is_refused(body, count // PER_INPUT + 1)
    assert is_refused(body, count // PER_INPUT) == (count > most or most < 1)

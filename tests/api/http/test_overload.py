"""Requests that are refused because the server is full: what they are told, and how little is done for them."""

import json

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.api.serving import connect, key_file_of, refused, serving
from tests.conftest import assert_idle, full_queue, is_idle, make_slow, reserving, until
from trio_pool_serve.api.http import overload, request_body, task_handler
from trio_pool_serve.api.http.json_body import model_named_in
from trio_pool_serve.api.http.request import WAITED_S, HttpRequest
from trio_pool_serve.api.http.request_body import RESERVED_AHEAD
from trio_pool_serve.config import Config
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.rendering import memory_budget
from trio_pool_serve.types import Client

ANOTHER = Client("another")


@pytest.fixture
def two(config: Config) -> Config:
    """Two models of one folder."""
    return attrs.evolve(config, models=(f"a={config.models[0]}", f"b={config.models[0]}"))


LARGE = {"input": ["hello " * 10] * 1000}


async def test_a_large_body_is_refused_unread_and_a_small_one_unrendered_when_the_queue_is_full(
    client, service, monkeypatch
):
    hops, decoded, decode_body = [], [], task_handler.decode_body
    service.offload.observe = lambda kind, *_: hops.append(kind)
    monkeypatch.setattr(
        task_handler, "decode_body", lambda body, *a, **o: decoded.append(1) or decode_body(body, *a, **o)
    )
    with full_queue(service):
        answer = await client.post("/v1/embeddings", json=LARGE)
        assert (answer.status_code, decoded, hops) == (429, [], [])
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 429
    assert hops == []
    assert_idle(service)


async def test_an_urgent_request_of_the_client_that_floods_is_answered(client, service):
    make_slow(service)
    with service.models.find().engine.admit(EstimatedWork(tokens=1000, client=Client("127.0.0.1"))):
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 429
        urgent = await client.post("/v1/embeddings", json={"input": "hello", "priority": -1})
        assert urgent.status_code == 200


async def test_a_request_whose_deadline_comes_before_its_turn_is_told_so(client, service):
    with full_queue(service):
        answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers={"X-Request-Timeout": "1"})
    assert (answer.status_code, "deadline" in answer.json()["error"]["message"]) == (429, True)


# -- memory -------------------------------------------------------------------------------------------


async def bodies(*pieces: bytes):
    for piece in pieces:
        yield piece
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("announces", [True, False])
async def test_a_body_that_does_not_fit_into_memory_is_429_and_the_next_one_is_not(client, service, announces):
    service.memory.max_bytes, service.memory.client_bytes = 100_000, 0
    body = json.dumps(LARGE).encode()
    assert 40_000 < len(body) < 100_000
    with reserving(service.memory, ANOTHER) as other:
        other.grow(50_000)
        content = body if announces else bodies(body[:1000], body[1000:30_000], body[30_000:])
        answer = await client.post(
            "/v1/embeddings", content=content, headers={"Content-Type": "application/json", "X-Request-Timeout": "60"}
        )
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    assert service.memory.held_bytes == 0
    assert (await client.post("/v1/embeddings", json=LARGE)).status_code == 200
    assert service.memory.held_bytes == 0


ANNOUNCED = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\nx"


async def announce(url: str, number: int) -> list[trio.SocketStream]:
    """Open connections that announce three megabytes and send a byte of them."""
    streams = [await connect(url) for _ in range(number)]
    for stream in streams:
        await stream.send_all(ANNOUNCED)
    return streams


async def test_memory_is_reserved_as_a_body_arrives_and_not_as_it_is_announced(client, url, service):
    service.memory.max_bytes = 10_000_000
    streams = await announce(url, 20)
    await until(lambda: service.memory.held_bytes == 20 * RESERVED_AHEAD)
    assert (await client.post("/v1/embeddings", json=LARGE)).status_code == 200
    for stream in streams:
        await stream.aclose()
    await until(lambda: is_idle(service))


async def test_bodies_that_do_not_arrive_make_room_for_others(client, url, service, monkeypatch):
    service.memory.max_bytes, service.memory.client_bytes = 3 * RESERVED_AHEAD, 0
    monkeypatch.setattr(memory_budget, "CLIENT_SHARE", 1)
    streams = await announce(url, 3)
    await until(lambda: service.memory.held_bytes == 3 * RESERVED_AHEAD)
    assert (await client.post("/v1/embeddings", json=LARGE)).status_code == 429
    monkeypatch.setattr(request_body, "STALLED_S", 0)
    service.memory._next_shortage = 0
    assert (await client.post("/v1/embeddings", json=LARGE)).status_code == 200
    for stream in streams:
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")
        await stream.aclose()
    assert service.memory.held_bytes == 0
    assert not service.memory.on_shortage


async def test_what_arrives_of_a_body_after_its_request_has_ended_is_thrown_away(url, service):
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nX-Request-Timeout: 0.1\r\n\r\n"
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    async with await connect(url) as stream:
        await stream.send_all(head + chunk)
        await until(lambda: service.memory.held_bytes == RESERVED_AHEAD)
        await until(lambda: not service.memory.held_bytes)  # its deadline has passed, and the rest is waited for
        await stream.send_all(chunk + b"0\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 504")
    assert service.memory.held_bytes == 0
    assert_idle(service)


async def test_vectors_of_tokens_count_by_what_they_will_take(client, service, scripted):
    service.memory.max_bytes, service.memory.client_bytes = 1000, 0
    with reserving(service.memory, ANOTHER) as other:
        other.grow(500)
        answer = await client.post("/pooling", json={"input": "hello " * 20, "task": "token_embed"})
        assert answer.status_code == 429
    assert (await client.post("/pooling", json={"input": "hello " * 20, "task": "token_embed"})).status_code == 200
    assert_idle(service)


# -- which model a body is for ------------------------------------------------------------------------


NAMED = {
    '{"model": "a", "input": "hello"}': "a",
    ' { "encoding_format":"base64", "dimensions" : 3, "model" : "a" }': "a",
    '{"input": ["hello", {"model": "b"}], "model": "a", "encoding_format": "float"} \n': "a",
    '{"input": "x", "model":"a"}': "a",
    '{"model": ""}': "",
    '{"input": "say \\"model\\": \\"b\\""}': None,
    '{"input": [{"x": 1, "model": "b"}]}': None,
    '{"model": "a"': None,
    "": None,
    '{"input": "' + "x" * 1000 + '", "model": "a"}': "a",
    '{"input": "' + "x" * 1000 + '", "model": "a", "other": "' + "x" * 1000 + '"}': None,
}


def test_the_model_is_known_without_decoding_where_nothing_is_nested_before_or_behind_it():
    for body, name in NAMED.items():
        assert model_named_in(body.encode()) == model_named_in(bytearray(body.encode())) == name, body


@given(
    st.dictionaries(
        st.sampled_from(["model", "input", "a", 'x"y']),
        st.one_of(st.text(), st.integers(), st.lists(st.text()), st.just({"model": "nested"})),
    )
)
def test_the_model_that_is_known_is_the_one_that_decoding_finds(fields):
    found = model_named_in(json.dumps(fields).encode())
    assert found is None or found == fields["model"]


@pytest.mark.parametrize("size", [10, 20_000])
async def test_a_request_for_the_full_model_is_refused_undecoded_and_one_for_the_other_answered(
    two, scripted, monkeypatch, size
):
    decoded, decode_body = [], task_handler.decode_body

    def decode(body, *args, **options):
        decoded.append(json.loads(bytes(body))["model"])
        return decode_body(body, *args, **options)

    monkeypatch.setattr(task_handler, "decode_body", decode)
    async with serving(two, scripted) as (service, client):
        with full_queue(service):
            body = {"input": "hello " * size, "truncate_prompt_tokens": 8}
            answers = [await client.post("/v1/embeddings", json={**body, "model": name}) for name in "ab"]
        assert [answer.status_code for answer in answers] == [429, 200]
        if size > 100:  # httpx sends head and body apart, so what is small has not arrived when it could be refused
            assert decoded == ["b"]


async def test_a_key_learns_nothing_of_a_model_that_it_may_not_use(two, scripted, tmp_path):
    keys = key_file_of(tmp_path, '[one]\nkey = "secret"\nmodels = ["b"]\n')
    keyed = attrs.evolve(two, network=attrs.evolve(two.network, api_keys_file=keys))
    async with serving(keyed, scripted) as (service, client):
        with full_queue(service):
            for text in ("hello", "hello " * 20_000):
                body = {"input": text, "truncate_prompt_tokens": 8, "model": "a"}
                answer = await client.post("/v1/embeddings", json=body, headers={"X-Api-Key": "secret"})
                assert answer.status_code == 404


async def test_a_body_that_is_too_large_is_never_told_to_come_back(config, scripted):
    small = attrs.evolve(config, network=attrs.evolve(config.network, max_body_bytes=1000))
    async with serving(small, scripted) as (service, client):
        with full_queue(service):
            assert (await client.post("/v1/embeddings", json={"input": "hello " * 200})).status_code == 413


async def test_a_request_behind_which_nothing_waits_is_answered_however_long_it_waited_to_be_read(service):
    request = HttpRequest({"headers": [], "method": "POST", "extensions": {WAITED_S: 60.0}}, "/v1/embeddings", 10**6)
    overload.refuse_before_thread(service, request, bytearray(b"{}"))
    with full_queue(service), pytest.raises(OverloadedError, match="longer than 5 s"):
        overload.refuse_before_thread(service, request, bytearray(b"{}"))


# -- threads ------------------------------------------------------------------------------------------


async def test_a_large_body_is_refused_when_others_wait_for_too_long_to_be_decoded(client, service):
    decoding = service.offload.undecoded
    own, other = Client("127.0.0.1").number, 1
    decoding.add(own, 600)
    decoding.add(other, 600)
    times = iter([0.0, 1.0, *(1.1,) * 100])
    decoding.clock = lambda: next(times)
    decoding.note_done(other)
    decoding.note_done(other, 99)
    assert decoding.total_s == pytest.approx(1100 / 99)
    assert "to be decoded" in (await refused(client, "/v1/embeddings", LARGE, 429))["message"]
    assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    decoding.withdraw(own, 600)  # and now the client has nothing waiting, though another has
    assert (await client.post("/v1/embeddings", json=LARGE)).status_code == 200
    decoding.withdraw(other, 500)
    assert_idle(service)

"""What is answered beneath Quart is answered as Quart would have it answered."""

import json
from collections.abc import AsyncIterator, Mapping

import attrs
import httpx
import pytest
import trio

from tests.conftest import client_of, listening, running
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.exchange import Exchange
from trio_pool_serve.api.http.quart_routes import view_of
from trio_pool_serve.app import create_app
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.service import Service

VECTOR = {"input": [[7]]}

ASKED: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "a vector": ("POST", "/v1/embeddings", {"json": VECTOR}),
    "bytes with a header": ("POST", "/v1/embeddings", {"json": {**VECTOR, "encoding_format": "bytes"}}),
    "events": ("POST", "/v1/embeddings", {"json": {**VECTOR, "stream": True}}),
    "another dialect's": ("POST", "/embed", {"json": {"inputs": [[7]]}}),
    "an error": ("POST", "/v1/embeddings", {"json": {"input": 5}}),
    "an error of another dialect": ("POST", "/embed", {"json": {"inputs": 5.5}}),
    "not JSON by its type": ("POST", "/v1/embeddings", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
    "a body in chunks": (
        "POST",
        "/v1/embeddings",
        {"content": "chunks", "headers": {"content-type": "application/json"}},
    ),
    "no body": ("POST", "/v1/embeddings", {}),
    "too large": ("POST", "/v1/embeddings", {"content": b"x" * 70_000}),
    "a bad deadline": ("POST", "/v1/embeddings", {"json": VECTOR, "headers": {"x-request-timeout": "soon"}}),
    "an unknown model": ("POST", "/v1/embeddings", {"json": {**VECTOR, "model": "other"}}),
    "no key": ("POST", "/v1/embeddings", {"json": VECTOR, "headers": {"authorization": ""}}),
    "a probe": ("GET", "/health", {}),
    "a probe of readiness": ("GET", "/readyz", {"headers": {"authorization": ""}}),
    "a path of two slashes": ("POST", "//embed", {"json": {"inputs": 5.5}}),
    "a probe of two slashes": ("GET", "//health", {"headers": {"authorization": ""}}),
    "a probe with a body": ("GET", "/health", {"content": b"x" * 2000}),
}

OF_THE_MOMENT = {"date", "server-timing", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"}


@pytest.fixture
async def guarded(config, scripted) -> AsyncIterator[Service]:
    network = attrs.evolve(config.network, api_key="s3cret", max_body_bytes=65_536)
    async with running(Service(attrs.evolve(config, network=network), lambda *_: scripted)) as service:
        yield service


async def chunks() -> AsyncIterator[bytes]:
    yield b'{"input"'
    yield b": [[7]]}"


async def ask(url: str, method: str, path: str, wanted: Mapping[str, object]) -> httpx.Response:
    content = wanted.get("content")
    given = {"x-request-id": "mine", "authorization": "Bearer s3cret"} | dict(wanted.get("headers", {}))
    async with client_of(url) as client:
        asked = {**wanted, "headers": given} | ({"content": chunks()} if content == "chunks" else {})
        return await client.request(method, path, **asked)


def lasting(answer: httpx.Response) -> tuple[int, dict[str, str], object]:
    """What of an answer does not depend on when it was given."""
    headers = {name: value for name, value in answer.headers.items() if name not in OF_THE_MOMENT}
    body: object = answer.content
    if answer.headers["content-type"] == "application/json":
        body = answer.json()
        if isinstance(body, dict):
            body.pop("created", None)
    if "metadata" in headers:
        metadata = json.loads(headers["metadata"])
        headers["metadata"] = {name: value for name, value in metadata.items() if name != "created"}
    return answer.status_code, headers, body


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
async def test_quart_gives_the_same_answer(asked, guarded):
    by_quart = create_app(guarded.config, guarded)
    by_quart.handlers = {}
    async with listening(guarded) as beneath, listening(guarded, by_quart) as above:
        one, other = await ask(beneath, *asked), await ask(above, *asked)
    assert lasting(one) == lasting(other)
    assert set(one.headers) == set(other.headers)


UNDER = [
    ("GET", "/api/health", 200, None),
    ("POST", "/api/embed", 401, "error_type"),
    ("POST", "/embed", 401, "error"),
    ("GET", "/health", 401, "error"),
    ("GET", "/api", 401, "error"),
]


@pytest.mark.parametrize(("method", "path", "status", "field"), UNDER)
async def test_routes_and_their_dialects_are_below_the_root_path(method, path, status, field, guarded):
    by_quart = create_app(guarded.config, guarded)
    by_quart.handlers = {}
    for app in (create_app(guarded.config, guarded), by_quart):
        async with listening(guarded, app, root_path="/api") as url:
            answer = await ask(url, method, path, {"headers": {"authorization": ""}})
        assert answer.status_code == status
        assert field is None or field in answer.json()


async def test_how_a_body_is_framed_counts_for_more_than_the_length_that_is_announced(url):
    async with await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:
        await stream.send_all(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"10\r\n" + b'{"input": [[7]]}' + b"\r\n0\r\n\r\n"
        )
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("beneath", [True, False])
async def test_an_error_in_a_group_with_a_cancellation_is_answered_as_itself(beneath, guarded):
    async def fail(exchange: Exchange) -> Answer:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                scope.cancel(reason="as a deadline does")
                raise InvalidRequestError("It is wrong all the same.")
        raise AssertionError

    app = create_app(guarded.config, guarded)
    app.handlers = {("POST", "/v1/embeddings"): fail}
    if not beneath:
        app.view_functions["POST /v1/embeddings"] = view_of(fail)
        app.handlers = {}
    async with listening(guarded, app) as url:
        answer = await ask(url, *ASKED["a vector"])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "It is wrong all the same."


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "/v1/embeddings", "POST"), ("POST", "/health", "GET")])
async def test_another_method_on_their_paths_is_405_with_those_that_are_not(method, path, allowed, url):
    async with client_of(url) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 405
    assert allowed in answer.headers["allow"]


async def test_the_head_of_a_probe_can_be_asked_for(client):
    answer = await client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_what_is_counted_is_counted_once(guarded):
    metrics = guarded.metrics

    def counted() -> tuple[float, float]:
        return metrics.requests._value.get(), metrics.failures._value.get()

    by_quart = create_app(guarded.config, guarded)
    by_quart.handlers = {}
    for app in (create_app(guarded.config, guarded), by_quart):
        before = counted()
        async with listening(guarded, app) as url:
            for name in ("a vector", "an error", "a probe"):
                await ask(url, *ASKED[name])
        assert (counted()[0] - before[0], counted()[1] - before[1]) == (2, 1)

"""Every route of the server is found in one table, by method and path."""

import json
from collections.abc import AsyncIterator, Mapping

import attrs
import httpx
import pytest

from tests.api.serving import connect, serving
from tests.conftest import client_of, listening, running
from trio_pool_serve.service import Service

VECTOR = {"input": [[7]]}
OPENAI, TEI = {"error"}, {"error", "error_type"}
ALL_EMBEDDINGS = {"error", "detail"}
BOM = b"\xef\xbb\xbf"
JSON = {"headers": {"content-type": "application/json"}}


@pytest.fixture
async def guarded(config, scripted) -> AsyncIterator[Service]:
    network = attrs.evolve(config.network, api_key="s3cret", max_body_bytes=65_536)
    async with running(Service(attrs.evolve(config, network=network), lambda *_: scripted)) as service:
        yield service


async def chunks() -> AsyncIterator[bytes]:
    yield b'{"input"'
    yield b": [[7]]}"


async def ask(client: httpx.AsyncClient, method: str, path: str, **options) -> httpx.Response:
    headers = {"x-request-id": "mine", "authorization": "Bearer s3cret", **options.pop("headers", {})}
    # The whole URL: of a path that begins with two slashes, httpx takes the beginning for a host.
    url = str(client.base_url).removesuffix("/") + path
    return await client.request(method, url, headers=headers, **options)


async def raw(url: str, head: str, *, body: bytes = b"", connection: str = "close") -> bytes:
    """Return what the server sends first in answer to a request whose head is given line by line."""
    lines = [*head.split("\n"), "Host: x", f"Connection: {connection}", "Authorization: Bearer s3cret"]
    async with await connect(url) as stream:
        await stream.send_all("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return bytes(await stream.receive_some())


def status_of(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


RESPONSES: Mapping[str, tuple[str, str, Mapping[str, object], int, set[str]]] = {
    "a vector": ("POST", "/v1/embeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "a body in chunks": (
        "POST",
        "/v1/embeddings",
        {"content": chunks, "headers": {"content-type": "application/json"}},
        200,
        {"data", "usage"},
    ),
    "an error": ("POST", "/v1/embeddings", {"json": {"input": 5}}, 400, OPENAI),
    "an error of another dialect": ("POST", "/embed", {"json": {"inputs": 5.5}}, 422, TEI),
    "not JSON by its type": ("POST", "/embed", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, TEI),
    "no body": ("POST", "/v1/embeddings", {}, 400, OPENAI),
    "too large": ("POST", "/v1/embeddings", {"content": b"x" * 70_000}, 413, ALL_EMBEDDINGS),
    "a bad deadline": ("POST", "/embed", {"json": {"inputs": "a"}, "headers": {"x-request-timeout": "soon"}}, 422, TEI),
    "an unknown model": ("POST", "/v1/embeddings", {"json": {**VECTOR, "model": "other"}}, 404, OPENAI),
    "no key": ("POST", "/v1/embeddings", {"json": VECTOR, "headers": {"authorization": ""}}, 401, ALL_EMBEDDINGS),
    "a probe": ("GET", "/health", {}, 200, {"status"}),
    "a probe without a key": ("GET", "/readyz", {"headers": {"authorization": ""}}, 200, {"status"}),
    "a probe with a body": ("GET", "/health", {"content": b"x" * 2000}, 200, {"status"}),
    "a probe of two slashes": ("GET", "//health", {"headers": {"authorization": ""}}, 200, {"status"}),
    "a path of two slashes": ("POST", "//embed", {"json": {"inputs": 5.5}}, 422, TEI),
    "two slashes within a path": ("POST", "/v1//embeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "percent-encoding": ("GET", "/%68ealth", {}, 200, {"status"}),
    "a query": ("GET", "/health?verbose=1", {}, 200, {"status"}),
    "a slash at the end": ("POST", "/v1/embeddings/", {"json": VECTOR}, 200, {"data", "usage"}),
    "slashes at the end": ("POST", "/embed//", {"json": {"inputs": 5.5}}, 422, TEI),
    "a probe with a slash at the end": ("GET", "/health/", {"headers": {"authorization": ""}}, 200, {"status"}),
    "a slash after nothing": ("GET", "/nothing/", {}, 404, OPENAI),
    "the root": ("GET", "/", {"headers": {"authorization": ""}}, 200, {"status"}),
    "the root without a key": ("POST", "/", {"json": {"inputs": "a"}, "headers": {"authorization": ""}}, 401, TEI),
    "a byte order mark": ("POST", "/v1/embeddings", {"content": BOM + b'{"input": [[7]]}', **JSON}, 200, {"data"}),
    "an empty model": ("POST", "/v1/embeddings", {"json": {**VECTOR, "model": ""}}, 200, {"data", "usage"}),
    "an encoded slash": ("POST", "/v1%2Fembeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "nothing": ("GET", "/nothing", {}, 404, OPENAI),
    "a long name of a static file": ("GET", f"/static/{'a' * 5000}", {}, 404, OPENAI),
    "nothing without a key": ("GET", "/nothing", {"headers": {"authorization": ""}}, 401, OPENAI),
    "no asset": ("GET", "/docs/oauth2-redirect.html", {}, 404, OPENAI),
    "TEI's info": ("GET", "/info", {}, 200, {"model_id", "version"}),
    "TEI's info without a key": ("GET", "/info", {"headers": {"authorization": ""}}, 401, TEI),
    "infinity's list of models": ("GET", "/models", {}, 200, {"data", "object"}),
    "models without a key": ("GET", "/v1/models", {"headers": {"authorization": ""}}, 401, OPENAI),
    "clearing a cache": ("POST", "/reset_mm_cache", {}, 200, {"status"}),
}


async def test_each_route_has_its_status_and_its_dialect(guarded):
    async with listening(guarded) as url, client_of(url) as client:
        for name, (method, path, options, status, fields) in RESPONSES.items():
            given = {**options, "content": chunks()} if options.get("content") is chunks else dict(options)
            answer = await ask(client, method, path, **given)
            assert answer.status_code == status, name
            assert answer.headers["content-type"] == "application/json", name
            assert fields <= answer.json().keys(), name
            assert answer.headers["x-request-id"] == "mine", name
            is_task = method == "POST" and path != "/reset_mm_cache" and status != 401
            assert ("server-timing" in answer.headers) == is_task, name


async def test_bytes_and_events_have_their_own_headers(client):
    answer = await client.post("/v1/embeddings", json={**VECTOR, "encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert json.loads(answer.headers["metadata"])["data"][0]["end"] == len(answer.content)
    answer = await client.post("/v1/embeddings", json={**VECTOR, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers


ALLOWED = {
    "OPTIONS, POST": ["/v1/embeddings", "/embed", "/reset_mm_cache", "/v1//embeddings", "/embed/"],
    "GET, HEAD, OPTIONS, POST": ["/", "/ping"],
    "GET, HEAD, OPTIONS": ["/health", "/metrics", "/v1/models", "/v1/models/org/name", "/docs", "/info"],
}


@pytest.mark.parametrize("allowed", ALLOWED)
async def test_routes_answer_head_as_get_and_options_and_refuse_other_methods(client, allowed):
    for path in ALLOWED[allowed]:
        options = await client.options(path)
        assert (options.status_code, options.headers["allow"], options.content) == (200, allowed, b"")
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "BREW"}.difference(allowed.split(", ")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (method, path)
            assert not answer.content if method == "HEAD" else "error" in answer.json()
        if "GET" in allowed:
            head, full = await client.head(path), await client.get(path)
            assert (head.status_code, head.headers["content-type"]) == (full.status_code, full.headers["content-type"])
            assert head.content == b""
            assert full.content


async def test_options_of_what_is_not_there_are_404(client):
    assert (await client.options("/nothing")).status_code == 404


@pytest.mark.parametrize("slash", ["/", "%2F"])
async def test_ids_of_models_may_have_slashes(config, scripted, slash):
    named = attrs.evolve(config, loading=attrs.evolve(config.loading, served_model_name="org/name"))
    async with serving(named, scripted) as (_service, client):
        answer = await client.get(f"/v1/models/org{slash}name")
        assert answer.status_code == 200
        assert answer.json()["id"] == "org/name"
        assert (await client.get(f"/v1/models/org{slash}name/")).json() == answer.json()
        listed = await client.get("/v1/models/")
        assert [card["id"] for card in listed.json()["data"]] == ["org/name"]


async def test_ids_of_models_may_begin_with_a_slash(client, config):
    assert config.models[0].startswith("/")
    assert (await client.get(f"/v1/models/{config.models[0]}")).json()["id"] == config.models[0]


UNDER = [
    ("GET", "/api/health", 200, None),
    ("GET", "/api//health", 200, None),
    ("POST", "/api/embed", 401, "error_type"),
    ("POST", "/embed", 401, "error"),
    ("GET", "/health", 401, "error"),
    ("GET", "/apihealth", 401, "error"),
    ("GET", "/api", 401, "error"),
]


async def test_routes_and_their_dialects_are_below_the_root_path(guarded):
    async with listening(guarded, root_path="/api") as url, client_of(url) as client:
        for method, path, status, field in UNDER:
            answer = await ask(client, method, path, headers={"authorization": ""})
            assert answer.status_code == status, path
            assert field is None or field in answer.json(), path
        for path in ("/api/nothing", "/nothing", "/api"):
            assert (await ask(client, "GET", path)).status_code == 404, path


async def test_targets_in_absolute_form_and_older_versions_are_understood(guarded):
    async with listening(guarded) as url:
        for head, status in {
            "GET http://x/health HTTP/1.1": 200,
            "GET http://x HTTP/1.1": 200,
            "PUT http://x HTTP/1.1": 405,
            "GET http://x/nothing HTTP/1.1": 404,
            "GET /health HTTP/1.0": 200,
            "GET /version HTTP/1.0": 200,
        }.items():
            assert status_of(await raw(url, head)) == status, head


async def test_a_body_is_framed_in_one_way(url):
    head = "POST /v1/embeddings HTTP/1.1\nContent-Type: application/json\nTransfer-Encoding: chunked"
    body = b'10\r\n{"input": [[7]]}\r\n0\r\n\r\n'
    assert status_of(await raw(url, head, body=body)) == 200
    assert status_of(await raw(url, f"{head}\nContent-Length: {len(body)}", body=body)) == 400


async def test_websockets_are_refused(guarded):
    upgrade = "Upgrade: websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    async with listening(guarded) as url:
        for path, status in {"/": 405, "/v1/embeddings": 405, "/health": 405, "/nothing": 404}.items():
            head = f"GET {path} HTTP/1.1\n{upgrade}"
            assert status_of(await raw(url, head, connection="Upgrade")) == status, path


async def test_what_is_counted_is_counted_once(guarded):
    metrics = guarded.metrics
    async with listening(guarded) as url, client_of(url) as client:
        for name in ("a vector", "an error", "a probe", "nothing"):
            method, path, options, _, _ = RESPONSES[name]
            await ask(client, method, path, **options)
    assert (metrics.requests._value.get(), metrics.failures._value.get()) == (2, 2)

"""Every route of the server is found in one table, by method and path."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest

from tests.api.dialects.test_every_dialect import COMPUTED, example, place
from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import connect, serving
from tests.conftest import client_of, listening, running
from tests.scripted_runner import ScriptedRunner, computed_by
from trio_pool_serve.config import Config, ModelConfig
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
    "a body in chunks": ("POST", "/v1/embeddings", {"content": chunks, **JSON}, 200, {"data", "usage"}),
    "an error": ("POST", "/v1/embeddings", {"json": {"input": 5}}, 400, OPENAI),
    "too large": ("POST", "/v1/embeddings", {"content": b"x" * 70_000}, 413, ALL_EMBEDDINGS),
    "a bad deadline": ("POST", "/embed", {"json": {"inputs": "a"}, "headers": {"x-request-timeout": "soon"}}, 422, TEI),
    "a probe": ("GET", "/health", {}, 200, {"status"}),
    "a probe with a body": ("GET", "/health", {"content": b"x" * 2000}, 200, {"status"}),
    "a path of two slashes": ("POST", "//embed", {"json": {"inputs": 5.5}}, 422, TEI),
    "two slashes within a path": ("POST", "/v1//embeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "percent-encoding": ("GET", "/%68ealth", {}, 200, {"status"}),
    "a query": ("GET", "/health?verbose=1", {}, 200, {"status"}),
    "a slash at the end": ("POST", "/v1/embeddings/", {"json": VECTOR}, 200, {"data", "usage"}),
    "slashes at the end": ("POST", "/embed//", {"json": {"inputs": 5.5}}, 422, TEI),
    "version 1 of version 1": ("POST", "/v1/v1/embeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "a byte order mark": ("POST", "/v1/embeddings", {"content": BOM + b'{"input": [[7]]}', **JSON}, 200, {"data"}),
    "an empty model": ("POST", "/v1/embeddings", {"json": {**VECTOR, "model": ""}}, 200, {"data", "usage"}),
    "an encoded slash": ("POST", "/v1%2Fembeddings", {"json": VECTOR}, 200, {"data", "usage"}),
    "nothing": ("GET", "/nothing", {}, 404, OPENAI),
    "options of nothing": ("OPTIONS", "/nothing", {}, 404, OPENAI),
    "a long name of a static file": ("GET", f"/static/{'a' * 5000}", {}, 404, OPENAI),
    "no asset": ("GET", "/docs/oauth2-redirect.html", {}, 404, OPENAI),
    "TEI's info": ("GET", "/info", {}, 200, {"model_id", "version"}),
    "infinity's list of models": ("GET", "/models", {}, 200, {"data", "object"}),
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
            is_task = method == "POST" and path != "/reset_mm_cache"
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


async def test_odd_targets_and_older_versions_are_understood(guarded):
    """What names no path is taken for /, which is a probe."""
    async with listening(guarded) as url:
        for head, status in {
            **{f"GET {target} HTTP/1.1": 200 for target in ("?", "*", "http://[::1/livez", "http://x/livez", "livez")},
            "GET /%ff%00 HTTP/1.1": 404,
            "GET http://x HTTP/1.1": 200,
            "PUT http://x HTTP/1.1": 405,
            "GET http://x/nothing HTTP/1.1": 404,
            "GET /health HTTP/1.0": 200,
            "GET /version HTTP/1.0": 200,
        }.items():
            assert status_of(await raw(url, head)) == status, head


async def test_websockets_are_refused(guarded):
    upgrade = "Upgrade: websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    async with listening(guarded) as url:
        for path, status in {"/": 405, "/v1/embeddings": 405, "/health": 405, "/nothing": 404}.items():
            head = f"GET {path} HTTP/1.1\n{upgrade}"
            assert status_of(await raw(url, head, connection="Upgrade")) == status, path


# -- the header ``Model-Fingerprint``, and what ``/v1/models`` says of the same ------------------------------------

HEADER = "model-fingerprint"


@asynccontextmanager
async def asked(config: Config, runner: ScriptedRunner) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(config, runner) as (service, client):
        serve_as(service, Everything())
        yield client


async def card_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/v1/models")
    assert HEADER not in answer.headers
    return answer.json()["data"][0]


async def test_every_response_that_a_model_computed_has_the_fingerprint_of_the_list(config):
    async with asked(config, ScriptedRunner(computed_by=computed_by("0123456789abcdef", "bfloat16"))) as client:
        card = await card_of(client)
        assert (card["dtype"], card["backend"]) == ("bfloat16", "torch")
        assert re.fullmatch("[0-9a-f]{16}", card["fingerprint"])
        document = (await client.get("/openapi.json")).json()["paths"]
        forms = ({}, {"stream": True}, {"encoding_format": "bytes"}, {"encoding_format": "base64"})
        for path, body in (
            *((path, example(endpoint, config)) for _, endpoint, path in COMPUTED),
            *(("/v1/embeddings", {"input": "hello", **form}) for form in forms),
            ("/invocations", {"input": "hello"}),
        ):
            answer = await client.post(place(path, config), json=body)
            assert (answer.status_code, answer.headers.get_list(HEADER)) == (200, [card["fingerprint"]]), (path, body)
            assert "Model-Fingerprint" in document[path]["post"]["responses"]["200"]["headers"], path
        refused = await client.post("/v1/embeddings", json={"input": "hello", "model": "none"})
        assert (refused.status_code, HEADER in refused.headers) == (404, False)


async def test_a_runner_that_says_nothing_of_itself_has_no_fingerprint(config):
    async with asked(config, ScriptedRunner()) as client:
        assert {"fingerprint", "dtype", "backend"}.isdisjoint(await card_of(client))
        assert HEADER not in (await client.post("/v1/embeddings", json={"input": "hello"})).headers


async def test_settings_that_change_inputs_change_the_fingerprint_and_others_do_not(config):
    async def fingerprint(weights: str = "0123456789abcdef", **settings: Any) -> str:
        changed = attrs.evolve(config, loading=ModelConfig(**settings))
        async with asked(changed, ScriptedRunner(computed_by=computed_by(weights))) as client:
            return (await card_of(client))["fingerprint"]

    first = await fingerprint()
    assert await fingerprint(trust_remote_code=True, cache_dir="", revision="main") == first, "a restart"
    others = [
        await fingerprint("fedcba9876543210"),
        await fingerprint(default_prompt="query: "),
        await fingerprint(max_model_len=16),
        await fingerprint(long_text="truncate"),
    ]
    assert len({first, *others}) == 1 + len(others)

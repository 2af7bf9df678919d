"""Which routes need the API key, by ``--api-key-scope``, and which pages of other origins may send requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import attrs
import httpx
import pytest

from tests.api.http import key_table
from tests.api.serving import serving
from tests.tables import each
from trio_pool_serve.api.routes.discovery import STATES
from trio_pool_serve.config import Config, KeyScope

KEY = "s3cret"
PROBES = [("GET", path) for path in ("/livez", "/readyz", "/health", "/ping", "/", "//health", "/health/")]
PROBES += [("HEAD", "/health"), ("POST", "/ping")]
PROBES += [("GET", f"{path}/{state}") for path in ("/v1/health", "/v2/health", "/.well-known") for state in STATES]
PROBES += [("GET", "/v1/cluster/auth"), ("GET", "/v1/cluster/auth/")]

VERSIONED = [("POST", path) for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify")]
VERSIONED += [("POST", path) for path in ("/v1/tokenize", "/v2/embed", "/v2/rerank", "/v1//embeddings")]
VERSIONED += [("GET", path) for path in ("/v1/nothing", "/v2", "/v2/models/none")] + [("POST", "/v1/models")]

OTHERS = [("POST", path) for path in ("/pooling", "/classify", "/score", "/rerank", "/embeddings")]
OTHERS += [("POST", path) for path in ("/tokenize", "/detokenize", "/invocations", "/livez")]
OTHERS += [("POST", path) for path in ("/", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity")]
OTHERS += [("GET", path) for path in ("/load", "/version", "/info", "/tokenizer_info", "/openapi.json", "/docs")]
OTHERS += [("GET", path) for path in ("/api/tags", "/meta", "/nothing", "/health/nothing", "/metrics2")]

CHANGING = [("POST", path) for path in ("/reset_mm_cache", "//reset_mm_cache", "/reset_mm_cache/", "/engine_hosts")]
CHANGING += [(method, "/engine_hosts") for method in ("GET", "HEAD", "OPTIONS", "DELETE")]

MODELS = [("GET", "/v1/models"), ("GET", "/v1/models/"), ("GET", "/v1/models/none"), ("HEAD", "/v1/models")]

NEEDED = {
    "probes": (PROBES, set()),
    "metrics": ([("GET", "/metrics"), ("GET", "/metrics/")], {"all", "all-but-models"}),
    "models": (MODELS, {"all", "all-but-metrics", "vllm"}),
    "models, by another name": ([("GET", "/models"), ("HEAD", "/models")], {"all", "all-but-metrics"}),
    "paths with a version": (VERSIONED, {"all", "all-but-metrics", "all-but-models", "vllm"}),
    "what changes something, and the hosts": (CHANGING, {"all", "all-but-metrics", "all-but-models", "vllm"}),
    "every other path": (OTHERS, {"all", "all-but-metrics", "all-but-models"}),
}
"""Routes in other spellings and methods than in ``key_table``, and the scopes of the key in which they need it."""


@asynccontextmanager
async def locked(config: Config, scripted, **network) -> AsyncIterator[httpx.AsyncClient]:
    config = attrs.evolve(config, network=attrs.evolve(config.network, api_key=KEY, **network))
    async with serving(config, scripted) as (_service, client):
        yield client


async def ask(client: httpx.AsyncClient, method: str, path: str, key: str | None = None, **headers) -> httpx.Response:
    """Ask with an empty body, which is no valid task: what is told apart is a 401 and whatever else comes of it."""
    given = headers if key is None else {**headers, "authorization": f"Bearer {key}"}
    # The whole URL: of a path that begins with two slashes, httpx takes the beginning for a host.
    return await client.request(method, str(client.base_url).removesuffix("/") + path, headers=given)


@pytest.mark.parametrize("scope", get_args(KeyScope))
async def test_the_scope_says_which_routes_need_the_key(config, scripted, scope):
    async with locked(config, scripted, api_key_scope=scope) as client:
        for name, (routes, scopes) in NEEDED.items():
            for method, path in routes:
                without, wrong, right = [await ask(client, method, path, key) for key in (None, "wrong", KEY)]
                needed = scope in scopes
                assert (without.status_code == 401) == needed, (name, method, path)
                assert (wrong.status_code == 401) == needed, (name, method, path)
                assert right.status_code != 401, (name, method, path)


async def test_every_route_needs_the_key_of_the_page_and_is_open_for_a_reason(scripted_folder, tmp_path):
    """The table of docs/keys-and-tls.md is what servers with each scope respond, and HEAD needs the key of GET."""
    async with key_table.servers(scripted_folder, tmp_path) as clients:
        needed = await key_table.needed_keys(clients)
        assert key_table.table(needed) == key_table.table_in(key_table.PAGE.read_text()), key_table.WRITTEN_BY
        for (method, path), keys in needed.items():
            if method == "GET":
                heads = [await key_table.needed_key(clients[scope], "HEAD", path) for scope in key_table.SCOPES]
                assert (*heads,) == keys, path


async def test_a_request_without_the_key_is_401_in_all_dialects_of_its_path(config, scripted):
    async with locked(config, scripted) as client:
        assert (await ask(client, "GET", "/health")).status_code == 200
        for path, fields in {
            "/metrics": {"error", "detail"},
            "/v1/embeddings": {"error", "detail"},
            "/rerank": {"error", "detail", "error_type"},
            "/api/embed": {"error"},
            "/v2/rerank": {"id", "message", "error"},
            "/predict": {"error", "error_type"},
        }.items():  # whose client it is, only the body would tell where several share a path
            answer = await ask(client, "GET" if path == "/metrics" else "POST", path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            assert answer.json().keys() == fields, path


# -- pages of other origins ------------------------------------------------------------------------------

MINE, THEIRS = "https://mine.example", "https://theirs.example"
ALLOWED = "access-control-allow-origin"


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@each(
    ("allowed", "origin", "told"),
    [
        ("", MINE, None),
        ("*", MINE, "*"),
        ("*", None, "*"),
        (MINE, MINE, MINE),
        (MINE, THEIRS, None),
        (MINE, None, None),
        (MINE, MINE.upper(), None),
        (f"{THEIRS}, {MINE}", MINE, MINE),
        (f"{MINE},*", THEIRS, "*"),
    ],
)
async def test_pages_of_allowed_origins_may_read_responses(config, scripted, allowed, origin, told):
    given = {} if origin is None else {"origin": origin}
    async with locked(config, scripted, cors_allow_origins=allowed) as client:
        for method, path, key, status in (
            ("GET", "/v1/models", KEY, 200),
            ("GET", "/v1/models", None, 401),
            ("GET", "/nothing", KEY, 404),
            ("GET", "/health", None, 200),
            ("POST", "/v1/embeddings", KEY, 400),
        ):
            answer = await ask(client, method, path, key, **given)
            assert answer.status_code == status, path
            assert answer.headers.get(ALLOWED) == told, path
            assert bool(cors_headers(answer)) == (told is not None), path
            # Caches must not give one origin's answer to another.
            assert (answer.headers.get("vary") == "origin") == bool(allowed and told != "*"), path
            if told is not None:
                exposed = cors_headers(answer)["access-control-expose-headers"].split(", ")
                assert {"model-fingerprint", "retry-after", "server-timing", "x-request-id"} <= set(exposed), path


@each("path", ["/v1/embeddings", "/embed", "/v1/models", "/metrics", "/"])
async def test_a_browser_asks_for_permission_without_the_key(config, scripted, path):
    asking = {
        "origin": MINE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    async with locked(config, scripted, cors_allow_origins=MINE) as client:
        answer = await ask(client, "OPTIONS", path, **asking)
        assert answer.status_code == 200
        assert answer.headers[ALLOWED] == MINE
        assert "POST" in answer.headers["access-control-allow-methods"].split(", ")
        assert answer.headers["access-control-allow-headers"] == asking["access-control-request-headers"]
        del asking["access-control-request-headers"]
        answer = await ask(client, "OPTIONS", path, **asking)
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        refused = await ask(client, "OPTIONS", path, **{**asking, "origin": THEIRS})
        assert not cors_headers(refused)
    async with locked(config, scripted) as client:
        for key, status in ((None, 401), (KEY, 200)):
            answer = await ask(client, "OPTIONS", path, key, origin=MINE)
            assert (answer.status_code, cors_headers(answer)) == (status, {})

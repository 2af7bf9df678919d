"""The document of all routes, and the page that shows it."""

import re

import msgspec
import pytest
from attrs import evolve

from tests.conftest import assert_idle, client_of, listening, running
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.dispatch import decode_body, endpoints_by_path
from trio_pool_serve.api.routes.openapi import ASSETS
from trio_pool_serve.app import create_app
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.service import Service


async def document(client) -> dict:
    answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


@pytest.mark.parametrize("tokenizer_info", [False, True])
async def test_every_route_is_described_and_nothing_else(config, scripted, tokenizer_info):
    config = evolve(config, input=evolve(config.input, enable_tokenizer_info_endpoint=tokenizer_info))
    async with (
        running(Service(config, lambda *_: scripted)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        await assert_described(client, config, service)


async def assert_described(client, config, service) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(client))["paths"].items() for method in methods
    }
    routed = {(method, path) for method, path in create_app(config, service).routes.routes if path[:6] != "/docs/"}
    assert described == routed


async def test_every_reference_leads_somewhere(client):
    found = await document(client)
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(found).decode())):
        assert name in found["components"]["schemas"]


async def test_every_field_of_a_request_is_in_its_schema(client):
    schemas = (await document(client))["components"]["schemas"]
    assert {"input", "encoding_format", "stream"} <= set(schemas["EmbeddingsRequest"]["properties"])


ENDPOINTS = [(path, candidate) for path, candidates in endpoints_by_path(DIALECTS).items() for candidate in candidates]


@pytest.mark.parametrize(
    ("path", "candidate"), ENDPOINTS, ids=[f"{candidate.dialect.name} {path}" for path, candidate in ENDPOINTS]
)
def test_every_example_is_read_by_the_endpoint_that_gives_it(path, candidate):
    body = msgspec.json.encode(candidate.endpoint.example)
    decoded = decode_body(body, endpoints_by_path(DIALECTS)[path], NetworkConfig(strict_requests=True))
    assert decoded.error is None
    assert decoded.claimed_by.endpoint is candidate.endpoint


async def test_the_page_fetches_nothing_from_outside(client, service):
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    linked = re.findall(r'(?:href|src|url)[=:] ?"([^"]+)"', page.text)
    assert set(linked) == {"openapi.json", *(f"docs/{name}" for name in ASSETS)}
    for link in linked:
        assert (await client.get(f"/{link}")).status_code == 200
    assert_idle(service)


async def test_only_the_pages_own_files_are_served(client):
    for name in ("oauth2-redirect.html", "..%2f__init__.py"):
        assert (await client.get(f"/docs/{name}")).status_code == 404

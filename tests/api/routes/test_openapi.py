"""The document of all routes, and the page that shows it."""

import re

import attrs
import msgspec

from tests.conftest import assert_idle
from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.http.endpoint_choice import decode_body, endpoints_by_path
from trio_pool_serve.api.routes.console import console_files
from trio_pool_serve.api.routes.openapi import ASSETS
from trio_pool_serve.app import create_app
from trio_pool_serve.config import NetworkConfig


async def document(client) -> dict:
    answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


async def assert_described(client, config, service) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(client))["paths"].items() for method in methods
    }
    files = {*(f"/docs/{name}" for name in ASSETS), *(f"/console/{name}" for name in console_files() if name)}
    routed = {(method, path) for method, path in create_app(config, service).routes.routes if path not in files}
    assert described == routed


async def test_every_route_is_described_and_nothing_else(client, config, service):
    await assert_described(client, config, service)


def names_of(schemas, references):
    """The fields of the objects that references lead to."""
    found = (schemas[reference["$ref"].rpartition("/")[2]] for reference in references)
    return [frozenset(schema["properties"]) for schema in found]


def bodies(found, path):
    return found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]


async def test_every_field_of_a_request_is_in_its_schema(client):
    found = await document(client)
    for path, candidates in endpoints_by_path(DIALECTS).items():
        described = names_of(found["components"]["schemas"], bodies(found, path))
        wires = [frozenset(field.name for field in attrs.fields(each.endpoint.wire)) for each in candidates]
        assert described == wires, path


async def test_responses_that_are_no_json_are_described(client):
    found = await document(client)
    for path, request in (
        ("/v1/embeddings", {"encoding_format": "bytes"}),
        ("/v1/embeddings", {"stream": True}),
        ("/pooling", {"encoding_format": "bytes_only"}),
        ("/pooling", {}),
    ):
        response = await client.post(path, json={"input": "hello"} | request)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] in found["paths"][path]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" not in found["paths"]["/pooling"]["post"]["responses"]["200"]["content"]


async def test_a_path_told_by_fields_takes_the_bodies_of_all_its_targets(client):
    found = await document(client)
    expected = [body for target in INVOCATIONS.targets for body in bodies(found, target)]
    assert bodies(found, INVOCATIONS.path) == expected


async def test_a_route_of_several_dialects_has_one_summary_and_an_example_of_each_openai_s_first(client):
    routes = {path: route["post"] for path, route in (await document(client))["paths"].items() if "post" in route}
    examples = routes["/v1/embeddings"]["requestBody"]["content"]["application/json"]["examples"]
    assert list(examples) == ["openai", "voyage", "jina"]
    assert all("summary" not in example for example in examples.values())  # Swagger UI would show it for the name
    invocations = routes[INVOCATIONS.path]["requestBody"]["content"]["application/json"]["examples"]
    assert next(iter(invocations)) == "openai /v1/embeddings"
    for path, route in routes.items():
        assert route["summary"].count(".") == 1, path


def test_every_example_is_read_by_the_endpoint_that_gives_it():
    for path, candidates in endpoints_by_path(DIALECTS).items():
        for candidate in candidates:
            body = msgspec.json.encode(candidate.endpoint.example)
            decoded = decode_body(body, candidates, NetworkConfig(strict_requests=True))
            assert (decoded.error, decoded.claimed_by) == (None, candidate), path


async def test_the_page_fetches_nothing_from_outside_and_no_other_files_are_served(client, service):
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    linked = re.findall(r'(?:href|src|url)[=:] ?"([^"]+)"', page.text)
    assert set(linked) == {"openapi.json", "console/icon.svg", *(f"docs/{name}" for name in ASSETS)}
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.text
    for link in linked:
        assert (await client.get(f"/{link}")).status_code == 200
    for name in ("oauth2-redirect.html", "..%2f__init__.py"):
        assert (await client.get(f"/docs/{name}")).status_code == 404
    assert_idle(service)

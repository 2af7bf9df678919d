"""The document of all routes, and the page that shows it."""

import re

import attrs
import msgspec
import pytest

from tests.conftest import assert_idle
from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.http.dispatch import decode_body, endpoints_by_path
from trio_pool_serve.api.routes.console import console_files
from trio_pool_serve.api.routes.openapi import ASSETS
from trio_pool_serve.app import create_app
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError


async def document(client) -> dict:
    answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


async def test_every_route_is_described_and_nothing_else(client, config, service):
    await assert_described(client, config, service)


async def assert_described(client, config, service) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(client))["paths"].items() for method in methods
    }
    files = {*(f"/docs/{name}" for name in ASSETS), *(f"/console/{name}" for name in console_files() if name)}
    routed = {(method, path) for method, path in create_app(config, service).routes.routes if path not in files}
    assert described == routed


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


async def test_a_path_told_by_fields_takes_the_bodies_of_all_its_targets(client):
    found = await document(client)
    expected = [body for target in INVOCATIONS.targets for body in bodies(found, target)]
    assert bodies(found, INVOCATIONS.path) == expected


VLLM_FIELDS = {
    "/v1/embeddings": {"use_activation", "padding", "chat_template_kwargs", "late_chunking", "late_chunking_params"},
    "/pooling": {"use_activation", "activation", "padding", "messages", "tasks"},
    "/classify": {"use_activation", "padding", "task"},
    "/score": {"use_activation", "padding", "chat_template_kwargs", "max_tokens_per_query", "max_tokens_per_doc"},
    "/v2/rerank": {"use_activation", "instruction", "truncate_prompt_tokens", "request_id", "return_documents"},
    "/tokenize": {"messages", "tools", "add_generation_prompt", "continue_final_message", "return_token_strs"},
}


@pytest.mark.parametrize("path", VLLM_FIELDS)
def test_strict_requests_take_vllm_s_fields_and_nothing_unknown(path):
    candidates = endpoints_by_path(DIALECTS)[path]
    strict = NetworkConfig(strict_requests=True)
    example = candidates[-1].endpoint.example
    known = msgspec.json.encode({**example, **dict.fromkeys(VLLM_FIELDS[path])})
    assert decode_body(known, candidates, strict).error is None
    unknown = msgspec.json.encode({**example, "no_such_field": None})
    refused = decode_body(unknown, candidates, strict).error
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "no_such_field"


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

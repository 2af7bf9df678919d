"""Every number of every wire type is bounded where it is decoded, and no body raises anything but its own error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.extreme_bodies import ENDPOINTS, JUNK, fields_of, json_of, numbers_of
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint import DialectEndpoint
from trio_pool_serve.api.http.endpoint_choice import decode_body, endpoints_by_path
from trio_pool_serve.api.http.error_responses import error_response
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import PoolServeError

BY_PATH = endpoints_by_path(DIALECTS)
CASES = [pytest.param(path, candidate, id=f"{candidate.dialect.name} {path}") for path, candidate in ENDPOINTS]


def status_of(path: str, body: bytes) -> int:
    """Return the status that a body is refused with, 200 if it is not."""
    decoded = decode_body(body, BY_PATH[path], NetworkConfig(), embeds=True)
    if decoded.error is None:
        return 200
    assert isinstance(decoded.error, PoolServeError)
    request = HttpRequest({"headers": []}, path, 2**20, claimed_by=decoded.claimed_by, wire=decoded.wire)
    return error_response(decoded.error, request, [decoded.claimed_by.dialect]).status


@pytest.mark.parametrize(("path", "candidate"), CASES)
def test_numbers_out_of_bounds_are_refused_where_they_are_decoded(path: str, candidate: DialectEndpoint):
    for name, kind in fields_of(candidate.endpoint.wire).items():
        for bounds in numbers_of(kind):
            assert -(2**63) <= bounds.ge < bounds.le < 2**63
            for wrong in (bounds.ge - 1, bounds.le + 1, 2**64, -(2**100), 2**100):
                for value in (wrong, [wrong], [[wrong]]):
                    body = json_of({**candidate.endpoint.example, name: value})
                    assert status_of(path, body) in (400, 422), (name, value)


@pytest.mark.parametrize(("path", "candidate"), CASES)
def test_any_value_in_any_field_is_read_or_refused(path: str, candidate: DialectEndpoint):
    for name in fields_of(candidate.endpoint.wire):
        for value in JUNK:
            assert status_of(path, json_of({**candidate.endpoint.example, name: value})) in (200, 400, 422)


@given(st.sampled_from(ENDPOINTS), st.sampled_from(JUNK))
def test_a_body_that_is_no_object_is_refused(endpoint: tuple[str, DialectEndpoint], value: Any):
    if value != {}:
        assert status_of(endpoint[0], json_of(value)) in (400, 422)


async def test_the_document_of_all_routes_says_the_bounds(client):
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    found, left = set(), [route.get("post", {}).get("requestBody") for route in document["paths"].values()]
    described = 0
    while left:
        schema = left.pop()
        if isinstance(schema, list):
            left += schema
        elif isinstance(schema, dict):
            name = schema.get("$ref", "").removeprefix("#/components/schemas/")
            left += [*schema.values(), *([schemas[name]] if name and name not in found else [])]
            found.add(name)
            if schema.get("type") in ("integer", "number"):
                assert -(2**63) <= schema["minimum"] < schema["maximum"] < 2**63
                assert schema["description"]
                described += 1
    assert described > 50
    priority, _ = schemas["EmbeddingsRequest"]["properties"]["priority"]["anyOf"]
    assert (priority["minimum"], priority["maximum"]) == (-(2**63), 2**63 - 1)

"""Every number of every wire type is bounded where it is decoded, and no body raises anything but its own error."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.extreme_bodies import ENDPOINTS, JUNK, bodies, fields_of, integers_of, json_of
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.dispatch import decode_body, endpoints_by_path
from trio_pool_serve.api.http.endpoint import DialectEndpoint
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
def test_every_integer_of_a_wire_type_has_bounds(path: str, candidate: DialectEndpoint):
    for kind in fields_of(candidate.endpoint.wire).values():
        for integer in integers_of(kind):
            assert integer.ge is not None
            assert integer.ge >= -(2**63)
            assert integer.le is not None
            assert integer.le < 2**63


@pytest.mark.parametrize(("path", "candidate"), CASES)
def test_integers_out_of_bounds_are_refused_where_they_are_decoded(path: str, candidate: DialectEndpoint):
    for name, kind in fields_of(candidate.endpoint.wire).items():
        for bounds in integers_of(kind):
            for wrong in (bounds.ge - 1, bounds.le + 1, 2**64, -(2**100), 2**100):
                for value in (wrong, [wrong], [[wrong]]):
                    body = json_of({**candidate.endpoint.example, name: value})
                    assert status_of(path, body) in (400, 422), (name, value)


@pytest.mark.parametrize(("path", "candidate"), CASES)
def test_any_value_in_any_field_is_read_or_refused(path: str, candidate: DialectEndpoint):
    for name in fields_of(candidate.endpoint.wire):
        for value in JUNK:
            assert status_of(path, json_of({**candidate.endpoint.example, name: value})) in (200, 400, 422)


@pytest.mark.parametrize(("path", "candidate"), CASES)
def test_several_extreme_fields_are_read_or_refused(path: str, candidate: DialectEndpoint):
    @settings(max_examples=20)
    @given(bodies(candidate))
    def check(body: bytes) -> None:
        assert status_of(path, body) in (200, 400, 422)

    check()


@given(st.sampled_from(ENDPOINTS), st.sampled_from(JUNK))
def test_a_body_that_is_no_object_is_refused(endpoint: tuple[str, DialectEndpoint], value: Any):
    if value != {}:
        assert status_of(endpoint[0], json_of(value)) in (400, 422)


async def test_the_document_of_all_routes_says_the_bounds(client):
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    described = 0

    def check(schema: Any, seen: frozenset[str] = frozenset()) -> None:
        nonlocal described
        if isinstance(schema, list):
            for part in schema:
                check(part, seen)
        elif isinstance(schema, dict):
            name = schema.get("$ref", "").removeprefix("#/components/schemas/")
            if name and name not in seen:
                check(schemas[name], seen | {name})
            if schema.get("type") == "integer":
                assert -(2**63) <= schema["minimum"] < schema["maximum"] < 2**63
                assert schema["description"]
                described += 1
            check(list(schema.values()), seen)

    for route in document["paths"].values():
        check(route.get("post", {}).get("requestBody"))
    assert described > 50
    priority, _ = schemas["EmbeddingsRequest"]["properties"]["priority"]["anyOf"]
    assert (priority["minimum"], priority["maximum"]) == (-(2**63), 2**63 - 1)

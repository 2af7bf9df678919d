"""Jobs have names of their own for what they are made of; each client is shown the names that it has sent."""

import ast
from pathlib import Path
from typing import get_args

import attrs
import pytest

import trio_pool_serve
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.errors import JobField

PACKAGE = Path(trio_pool_serve.__file__).parent


@pytest.mark.parametrize("package", ["tasks", "rendering", "models"])
def test_below_the_api_errors_have_the_job_s_names_only(package):
    calls = [
        (path.name, node.lineno, keyword.arg)
        for path in (PACKAGE / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "param"
    ]
    assert not calls


def test_each_name_is_a_field_of_the_request():
    for dialect in DIALECTS:
        for endpoint in dialect.endpoints:
            assert set(endpoint.field_names) <= set(get_args(JobField))
            for names in endpoint.field_names.values():
                names = {names} if isinstance(names, str) else {*(names or ())}
                assert names <= attrs.fields_dict(endpoint.wire).keys(), endpoint.paths


LONG = "hello " * 100
NOT_CUT = {"truncation": False}


async def test_a_stream_s_last_event_has_the_client_s_name(client):
    answer = await client.post(
        "/v1/embeddings", json={"input": [LONG], "stream": True, "input_type": "query", **NOT_CUT}
    )
    assert '"param":"input"' in answer.text
    assert "truncate it (`truncation`)" in answer.text

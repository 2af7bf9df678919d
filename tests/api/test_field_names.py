"""Jobs have names of their own for what they are made of; each client is shown the names that it has sent."""

import ast
from pathlib import Path
from typing import get_args

import attrs
import pytest

import trio_pool_serve
from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import refused
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
CONVERSATION = {"messages": [{"role": "user", "content": LONG}], "chat_template": "x"}

ERRORS = [
    ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions", "dimensions must be from 1 to 8"),
    ("/v1/embeddings", {"input": "a", "output_dimension": 9}, "output_dimension", "output_dimension must be from"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": LONG}, "input", "truncate it (`truncate_prompt_tokens`)"),
    ("/v1/embeddings", {"input": LONG, "task": "text-matching"}, "input", "truncate it (`truncate`)"),
    ("/v1/embeddings", {"input": LONG, **NOT_CUT}, "input", "truncate it (`truncation`)"),
    ("/v1/embeddings", {"input": "a", "prompt": "x" * 1000}, "prompt", "prompt has 1000 characters; the limit is 512."),
    ("/v1/embeddings", CONVERSATION, "chat_template", "--trust-request-chat-template"),
    ("/v1/embeddings", {**CONVERSATION, "chat_template": None}, "messages", "chat template"),
    ("/pooling", {"input": "a", "task": "none"}, "task", "must be 'embed', "),
    ("/pooling", {"input": "a", "tasks": ["embed", "none"]}, "tasks", "must be 'embed', "),
    ("/pooling", {"prompt_embeds": "AAAA"}, "prompt_embeds", "--enable-prompt-embeds"),
    ("/rerank", {"query": "a", "documents": [LONG]}, "documents", "truncate it (`truncate_prompt_tokens`)"),
    (
        "/rerank",
        {"query": "a", "documents": ["b"], "instruction": "x" * 1000},
        "instruction",
        "instruction has 1000 characters;",
    ),
    ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": -1}, "max_tokens_per_query", "must be"),
    ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", "max_tokens_per_doc"),
    ("/tokenize", {"prompt": "x" * 200_001}, "prompt", "characters"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "tokens has -1; this model's vocabulary has the ids 0 to 209."),
]


OTHERS = [
    ("/v2/embed", {"texts": ["a"], "output_dimension": 9}, 400, "output_dimension must be from 1 to 8"),
    ("/v2/embed", {"texts": [LONG], "truncate": "NONE"}, 400, "truncate it (`truncate`)"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, 400, "max_tokens_per_doc must be"),
    ("/embed", {"inputs": "a", "dimensions": 9}, 422, "dimensions must be from 1 to 8"),
    ("/embed", {"inputs": LONG, "truncate": False}, 422, "truncate it (`truncate`)"),
    ("/rerank", {"query": "a", "texts": [LONG], "truncate": False}, 422, "truncate it (`truncate`)"),
]
"""Requests of dialects that show the field in the message only."""


async def test_clients_are_shown_the_field_by_the_name_that_they_sent(client, service):
    serve_as(service, Everything())
    for path, body, param, message in ERRORS:
        error = await refused(client, path, body)
        assert error["param"] == param, (path, body, error)
        assert message in error["message"], (path, body, error)
    for path, body, status, message in OTHERS:
        answer = await client.post(path, json=body)
        assert answer.status_code == status, (path, body, answer.text)
        shown = answer.json().get("message") or answer.json()["error"]
        assert message in shown, (path, body)
        assert "{" not in shown, answer.text


async def test_a_stream_s_last_event_has_the_client_s_name(client):
    answer = await client.post(
        "/v1/embeddings", json={"input": [LONG], "stream": True, "input_type": "query", **NOT_CUT}
    )
    assert '"param":"input"' in answer.text
    assert "truncate it (`truncation`)" in answer.text

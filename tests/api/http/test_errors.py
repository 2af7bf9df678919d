"""Errors of requests, over a real socket: their shape and messages; nothing crashes, and the next one is answered."""

import json

import numpy as np
import pytest
import trio

from tests.api.scripted_models import LONG, Everything, Judge, LateInteraction, ids_of, serve_as
from tests.conftest import assert_idle, wait_idle
from tests.tables import each
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.app import create_app
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.types import Batch, CopiedBatch, Embed, PooledValue, PoolingParams, PoolingRequest, TokenEmbed

JSON = {"Content-Type": "application/json"}


async def test_a_wrong_value_before_a_deeply_nested_one_is_400(client, service):
    body = b'{"inputs": [-9007199254740993], "truncate": ' + b"[" * 7000 + b"]" * 7000 + b"}"
    assert (await client.post("/embed", content=body, headers=JSON)).status_code in (400, 422)


@each(
    ("header", "status"),
    [
        *((header, 400) for header in ("soon", "-1", "0", "-0", "nan", "1e-400", "-1e400", "0x10", "", "\xff", "١")),
        *((header, 200) for header in ("1e308", "1e400", "inf", "9" * 5000)),
    ],
)
async def test_a_deadline_that_is_no_number_of_seconds_is_400(client, service, header, status):
    headers = {b"X-Request-Timeout": header.encode()}
    answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers=headers)
    assert answer.status_code == status
    assert_idle(service)


# -- exceptions of a handler that are answered, and those that end the connection's task -----------------------------

INVALID = InvalidRequestError("wrong")


async def respond(config, *raised: BaseException) -> HttpResponse:
    """Return the response to a handler in whose nursery several tasks raise; alone, an exception is raised itself."""

    async def handler(request: HttpRequest) -> HttpResponse:
        del request
        if len(raised) == 1:
            raise raised[0]
        raise BaseExceptionGroup("of a nursery", raised)

    middleware = create_app(config).middleware
    return await middleware.respond(HttpRequest({"headers": []}, "/v1/embeddings", 2**20), handler)


@pytest.mark.parametrize("raised", [(INVALID,), (INVALID, INVALID), (INVALID, ExceptionGroup("inner", [INVALID]))])
async def test_an_error_is_answered_alone_and_in_a_group(config, raised):
    assert (await respond(config, *raised)).status == 400


async def test_an_error_beside_a_cancellation_is_answered(config):
    with trio.CancelScope() as scope:
        scope.cancel(reason="the client leaves")
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            response = await respond(config, INVALID, cancelled)
            raise
    assert response.status == 400


@pytest.mark.parametrize("raised", [(KeyboardInterrupt(),), (INVALID, KeyboardInterrupt()), (SystemExit(3), INVALID)])
async def test_what_ends_a_process_is_never_answered(config, raised):
    with pytest.raises((KeyboardInterrupt, SystemExit, BaseExceptionGroup)):
        await respond(config, *raised)


UNLUCKY = "w3"


def overflow(batch: Batch) -> CopiedBatch:
    """Give each row ones, or infinities if the unlucky word is in it."""

    def output(request: PoolingRequest, param: PoolingParams) -> PooledValue:
        number = np.inf if ids_of(UNLUCKY)[1] in request.prompt.token_ids else 1
        shape = {Embed: (8,), TokenEmbed: (1, 8)}.get(type(param), (1,))
        return np.full(shape, number, dtype=np.float32)

    return CopiedBatch([tuple(output(request, param) for param in request.params) for request in batch.requests])


NAMED = (
    ("spec", "path", "body", "place"),
    [
        (Everything(), "/v1/embeddings", {"input": ["w1", "w2", UNLUCKY, *["w4"] * 40]}, "input[2]"),
        (Everything(), "/v1/embeddings", {"input": [*["w1"] * 40, UNLUCKY]}, "input[40]"),
        (Everything(), "/v1/embeddings", {"input": UNLUCKY}, "input"),
        (Everything(), "/embed", {"inputs": ["w1", UNLUCKY]}, "inputs[1]"),
        (Everything(), "/v2/embed", {"texts": ["w1", UNLUCKY], "input_type": "search_document"}, "texts[1]"),
        (Everything(), "/v1/rerank", {"query": UNLUCKY, "documents": ["w1", "w2"]}, "query"),
        (Everything(), "/v1/rerank", {"query": "w1", "documents": ["w1", UNLUCKY]}, "documents[1]"),
        (Everything(), "/score", {"text_1": ["w1", UNLUCKY], "text_2": ["w1", "w2"]}, "text_1[1]"),
        (Judge(), "/v1/rerank", {"query": "w1", "documents": ["w1", UNLUCKY]}, "documents[1] with its query"),
        (LateInteraction(), "/v1/rerank", {"query": UNLUCKY, "documents": ["w1", "w2"]}, "query"),
        (LateInteraction(), "/v1/rerank", {"query": "w1", "documents": ["w1", UNLUCKY]}, "documents[1]"),
    ],
)
"""Requests with an input at fault, and its place."""


@each(*NAMED)
async def test_an_input_that_is_too_long_is_named(client, service, spec, path, body, place):
    serve_as(service, spec, prompts={"document": ""})
    sent = {
        **body,
        **({"truncate": False} if path == "/embed" else {"truncate": "NONE"} if path == "/v2/embed" else {}),
    }
    answer = await client.post(path, content=json.dumps(sent).replace(UNLUCKY, LONG), headers=JSON)
    assert answer.status_code == (422 if path == "/embed" else 400)
    assert f'"{place} has 10' in answer.text
    await wait_idle(service)


@each(*NAMED)
async def test_an_input_whose_output_is_not_finite_is_named(client, service, scripted, spec, path, body, place):
    serve_as(service, spec, prompts={"document": ""})
    scripted.on_launch = overflow
    answer = await client.post(path, json=body)
    assert f"The model's output for {place} is not finite. The request's id is " in answer.text
    assert answer.status_code == (424 if path == "/embed" else 500)
    assert (await client.post(path, content=answer.request.content.replace(b"w3", b"w5"))).status_code == 200
    assert_idle(service)

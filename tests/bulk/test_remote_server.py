"""Servers that do not do as they are asked: what ``--url`` makes of them."""

import json
from collections.abc import Callable

import httpx
import pytest
import trio

from trio_pool_serve.bulk.bulk_options import TextOptions
from trio_pool_serve.bulk.remote_server import RemoteServer
from trio_pool_serve.bulk.table_task import TaskOptions
from trio_pool_serve.errors import BulkInputError, UnavailableError
from trio_pool_serve.runs.tables.input_rows import InputRow

URL = "http://user:secret@server.test:8000/base"

ROWS = [InputRow(number, f"rows.jsonl:{number}", number, (f"text {number}",)) for number in range(2)]

Answer = Callable[[httpx.Request], httpx.Response]


def server_that(answer: Answer, **task: object) -> RemoteServer:
    client = httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(answer))
    options = TaskOptions(**{"task": "embed", "columns": ("text",), **task})
    return RemoteServer(options, TextOptions(), (), client, "", trio.CapacityLimiter(8))


def models() -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": "m"}]})


def embeddings(request: httpx.Request) -> httpx.Response:
    """Answer as a server whose model has vectors of four numbers, and which ignores ``dimensions``."""
    if request.method == "GET":
        return models()
    texts = json.loads(request.content)["input"]
    data = [{"index": index, "embedding": [1.0, 2, 3, 4]} for index in range(len(texts))]
    return httpx.Response(200, json={"data": data})


async def test_what_is_kept_and_printed_of_the_url_has_no_secrets():
    server = server_that(embeddings)
    await server.describe()
    assert await server.identity() == {"--url": "http://server.test:8000/base/", "the server's model": "m"}

    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(UnavailableError, match=r"http://server\.test:8000/base/ does not respond") as caught:
        await server_that(unreachable).describe()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_ends_the_run_and_is_not_an_error_of_the_rows(status):
    def redirect(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"location": f"https://u:secret@other.test{request.url.path}"})

    server = server_that(redirect, task="classify")
    with pytest.raises(BulkInputError, match=rf"/classify to https://other\.test/base/classify \(status {status}\)"):
        await server._post("/classify", {})
    with pytest.raises(BulkInputError, match=r"/v1/models to https://other\.test/base/v1/models"):
        await server.describe()
    with pytest.raises(BulkInputError):
        await server.compute(ROWS)
    to_nowhere = server_that(lambda _: httpx.Response(304), task="classify")
    with pytest.raises(BulkInputError, match=r"redirects /classify \(status 304\)"):
        await to_nowhere._post("/classify", {})


async def test_vectors_have_the_length_of_the_sample_or_are_an_error_that_says_so():
    server = server_that(embeddings)
    await server.describe()
    result = await server.compute(ROWS)
    assert [values.tolist() for row in result.rows for values in row.values] == [[1, 2, 3, 4]] * 2
    server.length = 3  # the server has another model by now
    with pytest.raises(BulkInputError, match=r"vectors of 4 numbers; 3 were expected\.$"):
        await server.compute(ROWS)
    server = server_that(embeddings, dimensions=2)  # which it ignores
    await server.describe()
    with pytest.raises(BulkInputError, match=r"2 were expected\. It may not support --dimensions"):
        await server.compute(ROWS)


@pytest.mark.parametrize("embedding", [1.0, [[1.0, 2.0]]])
async def test_what_is_no_vector_is_not_understood(embedding):
    def answer(request: httpx.Request) -> httpx.Response:
        vector = httpx.Response(200, json={"data": [{"index": 0, "embedding": embedding}]})
        return models() if request.method == "GET" else vector

    with pytest.raises(UnavailableError, match="does not have the form of OpenAI"):
        await server_that(answer).describe()

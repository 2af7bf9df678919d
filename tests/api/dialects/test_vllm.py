"""What vLLM's routes have in common, and its tokens; over real sockets, with a scripted runner."""

import httpx
import pytest

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import refused
from tests.conftest import wait_idle
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.service import Service

LONG = "hello " * 20
"""About 30 tokens by the guess that admission makes, and 22 in truth."""

BODIES = {
    "/pooling": {"input": LONG},
    "/classify": {"input": LONG},
    "/v1/classify": {"input": LONG},
    "/score": {"text_1": LONG, "text_2": "world"},
    "/v1/score": {"text_1": LONG, "text_2": "world"},
    "/rerank": {"query": LONG, "documents": ["world"]},
    "/v1/rerank": {"query": LONG, "documents": ["world"]},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [5, 6]},
}
COMPUTED = [path for path in BODIES if "tokenize" not in path]

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def service(service):
    serve_as(service, Everything())
    return service


async def assert_still_serving(client: httpx.AsyncClient, service: Service, path: str) -> None:
    answer = await client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    await wait_idle(service)


@each("path", COMPUTED)
async def test_an_over_long_input_is_refused_unless_it_may_be_cut(client, service, path):
    body = {name: "hello " * 100 if value == LONG else value for name, value in BODIES[path].items()}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    length = 102 if "input" in body else 104  # the model has a prompt of its own for queries
    assert f"{length} tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == ("input" if "input" in body else None)
    assert "maximum context length is 64 tokens" in answer.json()["error"]["message"]
    assert (await client.post(path, json={**body, "truncate_prompt_tokens": -1})).status_code == 200
    await assert_still_serving(client, service, path)


@each("path", COMPUTED)
@each(
    "wrong",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 65},
        {"truncate_prompt_tokens": "five"},
        {"truncation_side": "top"},
        {"use_activation": "yes"},
        {"padding": "max_length"},
        {"priority": 1.5},
    ],
)
async def test_a_wrong_value_is_400_and_named(client, service, path, wrong):
    assert (await refused(client, path, {**BODIES[path], **wrong}))["param"] == next(iter(wrong))
    await assert_still_serving(client, service, path)


# -- tokens ----------------------------------------------------------------------------------------------

HELLO, WORLD, CLS, SEP = (VOCABULARY[word] for word in ("hello", "world", "[CLS]", "[SEP]"))


async def test_a_prompt_s_tokens_are_those_the_model_would_read(client, scripted):
    answer = (await client.post("/tokenize", json={"prompt": "Hello world"})).json()
    assert answer == {"count": 4, "max_model_len": 64, "tokens": [CLS, HELLO, WORLD, SEP], "token_strs": None}
    assert scripted.batches == []


async def test_tokens_come_as_the_vocabulary_writes_them_if_asked(client):
    body = {"prompt": "Hello world", "add_special_tokens": False, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == [HELLO, WORLD]
    assert answer["token_strs"] == ["hello", "world"]
    assert answer["count"] == 2


async def test_more_tokens_than_the_model_takes_are_counted_all_the_same(client):
    answer = (await client.post("/tokenize", json={"prompt": "hello " * 5000})).json()
    assert answer["count"] == len(answer["tokens"]) == 5002


@each(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": None}, "prompt"), ({"messages": [{"role": "user", "content": "hello"}]}, "messages")],
)
async def test_what_cannot_be_tokenized_is_400(client, service, body, param):
    assert (await refused(client, "/tokenize", body))["param"] == param
    await assert_still_serving(client, service, "/tokenize")


async def test_a_lone_surrogate_is_400(client, service):
    answer = await client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert answer.status_code == 400
    await assert_still_serving(client, service, "/tokenize")


async def test_tokens_become_text_again_with_their_special_ones(client):
    answer = (await client.post("/detokenize", json={"tokens": [CLS, HELLO, WORLD, SEP], "model": None})).json()
    assert answer == {"prompt": "[CLS] hello world [SEP]"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@each("tokens", [[-1], [len(VOCABULARY)], [10**30], ["hello"], [1.5], [[1]], "hello", None, 5])
async def test_what_is_no_token_of_the_vocabulary_is_400(client, service, tokens):
    assert (await refused(client, "/detokenize", {"tokens": tokens}))["param"] == "tokens"
    await assert_still_serving(client, service, "/detokenize")

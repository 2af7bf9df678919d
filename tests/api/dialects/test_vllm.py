"""What vLLM's routes have in common, and its tokens; over real sockets, with a scripted runner."""

import attrs
import httpx
import msgspec
import pytest
import trio

from tests.api.scripted_models import Everything, serve_as
from tests.conftest import assert_idle, client_of, listening, make_slow, running, wait_idle
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.api.dialects.vllm import VLLM
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
TASKS = {"pooling": "embed", "classify": "classify", "score": "score", "rerank": "score"}

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def service(service):
    serve_as(service, Everything())
    return service


async def assert_still_serving(client: httpx.AsyncClient, service: Service, path: str) -> None:
    answer = await client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    await wait_idle(service)


async def test_every_route_is_tested():
    assert set(BODIES) == {path for endpoint in VLLM.endpoints for path in endpoint.paths}


@pytest.mark.parametrize("endpoint", VLLM.endpoints, ids=lambda endpoint: endpoint.paths[0])
async def test_examples_are_answered(client, service, endpoint):
    for path in endpoint.paths:
        answer = await client.post(path, json=endpoint.example)
        assert answer.status_code == 200, answer.text
        always = {field.name for field in attrs.fields(endpoint.response) if field.default is not msgspec.UNSET}
        assert set(answer.json()) == always
    assert_idle(service)


@each("path", BODIES)
async def test_malformed_json_is_400_in_openai_s_shape(client, service, path):
    for body in (b'{"input": "hello"', b"", b"[1]", b'{"model": 5}', b"{}"):
        answer = await client.post(path, content=body, headers=JSON)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "BadRequestError"
        assert error["code"] == 400
    await assert_still_serving(client, service, path)


@each("path", BODIES)
async def test_a_body_that_is_not_json_is_415(client, service, path):
    answer = await client.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert answer.json()["error"]["type"] == "UnsupportedMediaType"
    await assert_still_serving(client, service, path)


@each("path", BODIES)
async def test_an_unknown_model_is_404(client, service, path):
    answer = await client.post(path, json={**BODIES[path], "model": "nobody/nothing"})
    assert answer.status_code == 404
    assert "nobody/nothing" in answer.json()["error"]["message"]
    await assert_still_serving(client, service, path)


@each("path", BODIES)
async def test_the_model_may_be_named_and_unknown_fields_are_ignored(client, config, path):
    answer = await client.post(path, json={**BODIES[path], "model": config.models[0], "no_such_field": 1})
    assert answer.status_code == 200


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
    answer = await client.post(path, json={**BODIES[path], **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(wrong))
    await assert_still_serving(client, service, path)


@pytest.mark.parametrize("path", COMPUTED)
async def test_a_task_that_the_model_cannot_do_names_those_that_it_can(client, service, path):
    class Other(Everything):
        tasks = Everything.tasks - {TASKS[path.rpartition("/")[2]]}

    serve_as(service, Other())
    wanted = {"task": "embed"} if path == "/pooling" else {}
    answer = await client.post(path, json={**BODIES[path], **wanted})
    assert answer.status_code == 400
    assert f"Supported tasks: {sorted(Other.tasks)}" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert_idle(service)


@pytest.mark.parametrize("path", COMPUTED)
async def test_a_deadline_that_passes_is_504_and_leaves_nothing_behind(client, service, scripted, path):
    scripted.gate.clear()
    answer = await client.post(path, json=BODIES[path], headers={"X-Request-Timeout": "0.05"})
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "DeadlineExceeded"
    assert service.default.engine.statistics().admitted_tokens == 0
    scripted.gate.set()
    await assert_still_serving(client, service, path)


@pytest.mark.parametrize("path", COMPUTED)
async def test_a_full_queue_is_429_with_the_time_to_come_back(config, scripted, path):
    async with (
        running(Service(config, lambda *_: scripted)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        serve_as(service, Everything())
        make_slow(service)
        scripted.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.post(path, json=BODIES[path]))
            await trio.to_thread.run_sync(scripted.launching.wait, limiter=trio.CapacityLimiter(1))
            answer = await client.post(path, json=BODIES[path])
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "RateLimitError"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert int(answer.headers["retry-after-ms"]) >= 1000
            scripted.gate.set()
        await assert_still_serving(client, service, path)


@pytest.mark.parametrize("path", COMPUTED)
async def test_a_batch_that_fails_is_500_without_internals(client, service, scripted, path):
    def fail(batch):
        raise ValueError("secret of the house")

    scripted.on_launch = fail
    answer = await client.post(path, json=BODIES[path])
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text
    scripted.on_launch = None
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


async def test_null_stands_for_not_given_to_tokenize(client):
    fields = dict.fromkeys(["model", "add_special_tokens", "return_token_strs", "messages"])
    answer = (await client.post("/tokenize", json={"prompt": "hello", **fields})).json()
    assert answer["tokens"] == [CLS, HELLO, SEP]
    assert answer["token_strs"] is None


async def test_more_tokens_than_the_model_takes_are_counted_all_the_same(client):
    answer = (await client.post("/tokenize", json={"prompt": "hello " * 5000})).json()
    assert answer["count"] == len(answer["tokens"]) == 5002


@each(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["hello"]}, "prompt"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages"),
        ({"prompt": "hello", "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"prompt": "hello", "return_token_strs": 2}, "return_token_strs"),
    ],
)
async def test_what_cannot_be_tokenized_is_400(client, service, body, param):
    answer = await client.post("/tokenize", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
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
    answer = await client.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "tokens"
    await assert_still_serving(client, service, "/detokenize")

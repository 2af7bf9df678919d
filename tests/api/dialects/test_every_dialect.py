"""All endpoints over real sockets: their examples, and errors that are about no field, each in its dialect's form."""

from typing import Any

import attrs
import httpx
import msgspec
import pytest

from tests.api.scripted_models import Everything, Unable, Undeclared, serve_as
from tests.conftest import full_queue, wait_idle
from tests.tables import each
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint import Dialect, Endpoint
from trio_pool_serve.api.http.endpoint_choice import endpoints_by_path
from trio_pool_serve.config import Config

JSON = {"Content-Type": "application/json"}

ENDPOINTS = [
    (dialect, endpoint, path) for dialect in DIALECTS for endpoint in dialect.endpoints for path in endpoint.paths
]
COMPUTED = [case for case in ENDPOINTS if not case[2].endswith(("tokenize", "/decode"))]
ALONE = [case for case in ENDPOINTS if len(endpoints_by_path(DIALECTS)[case[2]]) == 1]
"""On paths that no other dialect shares, even a body that cannot be read is answered in the dialect's form."""

NAMES = ("dialect", "endpoint", "path")

UNREADABLE = {
    "malformed JSON": b'{"inputs": "hello"',
    "not UTF-8": b'{"inputs": "\xff\xfe"}',
    "nested past reason": b'{"inputs":' + b"[" * 100_000,
    "no body": b"",
    "not an object": b"[1, 2]",
    "null": b"null",
    "nothing": b"{}",
    "a model that is no text": b'{"model": 5}',
    "a lone surrogate": b'{"model": "\\ud800"}',
}

BESIDE_OPENAI_S = {"cohere": {"id", "message"}}
STRINGS = ("ollama", "weaviate", "elasticsearch", "open_inference")
"""Their errors are nothing but a message."""
STATUSES = {"tei": {400: 422, 500: 424}, "ollama": {429: 503}}


def place(path: str, config: Config) -> str:
    """Return the path of a route for the only model."""
    return path.replace("{name}", config.models[0])


def example(endpoint: Endpoint, config: Config) -> dict[str, Any]:
    """Return the example of a request; if it names a model, the only one."""
    return {name: config.models[0] if name == "model" else value for name, value in endpoint.example.items()}


def ids(cases: list[tuple[Dialect, Endpoint, str]]) -> list[str]:
    return [f"{dialect.name} {path}" for dialect, _, path in cases]


def assert_error(answer: httpx.Response, dialect: Dialect, status: int, kind: str) -> str:
    """Return the message of an error in the dialect's form, of a type as OpenAI's and TEI's clients know it."""
    body, own = answer.json(), STATUSES.get(dialect.name, {})
    assert answer.headers["content-type"] == "application/json"
    assert answer.status_code == own.get(status, status), answer.text
    error = body["error"]
    if dialect.name in STRINGS:
        assert set(body) == {"error"}
        return error
    if dialect.name == "tei":
        assert set(body) == {"error", "error_type"}
        assert body["error_type"] == kind.partition("/")[2]
        return error
    assert set(body) == {"error", *BESIDE_OPENAI_S.get(dialect.name, ["detail"])}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind.partition("/")[0], status)
    assert body.get("id", answer.headers["x-request-id"]) == answer.headers["x-request-id"]
    assert {body.get("message", error["message"]), body.get("detail", error["message"])} == {error["message"]}
    return error["message"]


@pytest.fixture
async def service(service):
    serve_as(service, Everything())
    yield service
    await wait_idle(service)


@each(NAMES, ENDPOINTS, ids(ENDPOINTS))
async def test_examples_are_answered(client, config, dialect, endpoint, path):
    answer = await client.post(place(path, config), json=example(endpoint, config))
    assert answer.status_code == 200, answer.text
    if endpoint.response is not None:
        always = {field.name for field in attrs.fields(endpoint.response) if field.default is not msgspec.UNSET}
        beside = {"data"} if (dialect.name, path) == ("vllm", "/v1/rerank") else set()
        assert set(answer.json()) == always | beside


@each("body", UNREADABLE.values(), UNREADABLE)
@each(NAMES, ALONE, ids(ALONE))
async def test_a_body_that_cannot_be_read_is_400(client, config, dialect, endpoint, path, body):
    answer = await client.post(place(path, config), content=body, headers=JSON)
    assert_error(answer, dialect, 400, "BadRequestError/Validation")


@each("path", [path for dialect, _, path in ENDPOINTS if dialect.name == "vllm"])
async def test_where_dialects_share_a_path_openai_s_clients_find_their_error(client, path):
    for body in (b'{"input": "hello"', b"", b"[1]", b'{"model": 5}', b"{}"):
        answer = await client.post(path, content=body, headers=JSON)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (answer.status_code, error["type"], error["code"]) == (400, "BadRequestError", 400)


@each(NAMES, ALONE, ids(ALONE))
async def test_a_body_that_is_not_json_is_415_except_for_ollama(client, config, dialect, endpoint, path):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = msgspec.json.encode(example(endpoint, config))
    answer = await client.post(place(path, config), content=body, headers=headers)
    if dialect.name == "ollama":  # its documentation sends them so, with curl
        assert answer.status_code == 200, answer.text
    else:
        assert_error(answer, dialect, 415, "UnsupportedMediaType/UnsupportedMediaType")


@each(NAMES, ALONE, ids(ALONE))
async def test_a_route_beside_the_dialect_s_and_another_method_are_refused_in_its_shape(
    client, config, dialect, endpoint, path
):
    is_fixed, path = path != "/" and "{name}" not in path, place(path, config)
    if is_fixed:  # else there is a route for any name
        message = assert_error(await client.post(f"{path}x", json={}), dialect, 404, "NotFoundError/Validation")
        assert message.startswith(f"No route {path}x")
    answer = await client.put(path, json={})
    assert assert_error(answer, dialect, 405, "MethodNotAllowedError/Validation").endswith(", not PUT.")
    assert "POST" in answer.headers["allow"]


@each(NAMES, ENDPOINTS, ids(ENDPOINTS))
async def test_an_unknown_model_is_404_and_a_known_one_may_be_named(client, config, dialect, endpoint, path):
    unknown = path.replace("{name}", "nobody/nothing")
    answer = await client.post(unknown, json={**endpoint.example, "model": "nobody/nothing"})
    assert "nobody/nothing" in assert_error(answer, dialect, 404, "NotFoundError/Validation")
    path = place(path, config)
    answer = await client.post(path, json={**endpoint.example, "model": config.models[0], "no_such_field": 1})
    assert answer.status_code == 200


@each(NAMES, COMPUTED, ids(COMPUTED))
async def test_a_task_that_the_model_cannot_do_is_refused_with_the_tasks_that_it_can(
    client, config, service, scripted, dialect, endpoint, path
):
    serve_as(service, Unable())
    wanted = {"task": "embed"} if path == "/pooling" else {}
    answer = await client.post(place(path, config), json={**example(endpoint, config), **wanted})
    message = assert_error(answer, dialect, 424 if dialect.name == "tei" else 400, "BadRequestError/Backend")
    assert message.endswith("token_classify.")
    assert scripted.batches == []


RANKED = [(dialect, endpoint, path) for dialect, endpoint, path in COMPUTED if "rank" in path or "score" in path]


@each(NAMES, RANKED, ids(RANKED))
async def test_a_model_that_may_be_a_reranker_says_why_it_does_not_rank(
    client, config, service, scripted, dialect, endpoint, path
):
    serve_as(service, Undeclared(no_score="If it is an embedding model, set --task embed."))
    answer = await client.post(place(path, config), json=example(endpoint, config))
    message = assert_error(answer, dialect, 424 if dialect.name == "tei" else 400, "BadRequestError/Backend")
    assert message.endswith("token_embed. If it is an embedding model, set --task embed.")
    assert scripted.batches == []
    entry = (await client.get("/v1/models")).json()["data"][0]
    assert entry["tasks"] == ["embed", "token_embed"]


@each(NAMES, COMPUTED, ids(COMPUTED))
async def test_a_deadline_that_passes_is_504_and_leaves_nothing_behind(
    client, config, service, scripted, dialect, endpoint, path
):
    path, body = place(path, config), example(endpoint, config)
    scripted.gate.clear()
    answer = await client.post(path, json=body, headers={"X-Request-Timeout": "0.05"})
    assert_error(answer, dialect, 504, "DeadlineExceeded/Timeout")
    statistics = service.models.find().engine.statistics()
    assert (statistics.queued_rows, statistics.admitted_tokens) == (0, 0)
    scripted.gate.set()
    assert (await client.post(path, json=body)).status_code == 200
    await wait_idle(service)


async def test_a_full_queue_is_429_with_the_time_to_come_back(client, config, service, subtests):
    with full_queue(service):
        for dialect, endpoint, path in COMPUTED:
            with subtests.test(f"{dialect.name} {path}"):
                answer = await client.post(place(path, config), json=example(endpoint, config))
                if (dialect, endpoint, path) in ALONE or dialect.name in ("tei", "weaviate"):
                    assert_error(answer, dialect, 429, "RateLimitError/Overloaded")
                else:  # refused before it is known which of the path's dialects it is in
                    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "RateLimitError")
                assert 1 <= int(answer.headers["retry-after"]) <= 30
                assert int(answer.headers["retry-after-ms"]) >= 1000


@each(NAMES, COMPUTED, ids(COMPUTED))
async def test_a_batch_that_fails_is_500_without_internals(client, config, scripted, caplog, dialect, endpoint, path):
    def fail(batch):
        raise ValueError("secret of the house")

    path, body = place(path, config), example(endpoint, config)
    scripted.on_launch = fail
    answer = await client.post(path, json=body, headers={"X-Request-Id": "abc"})
    assert "abc" in assert_error(answer, dialect, 500, "InternalServerError/Backend")
    assert "secret" not in answer.text
    assert "secret" in caplog.text
    scripted.on_launch = None
    assert (await client.post(path, json=body)).status_code == 200

"""Every row of the error table, over a real socket; nothing crashes, and the next request is answered."""

import attrs
import httpx
import pytest

from tests.api.serving import refused, serving
from tests.conftest import assert_idle, wait_idle
from tests.tables import each
from trio_pool_serve.service import Service

BAD_BODIES = {
    "malformed JSON": (b'{"input": "hello"', None),
    "not UTF-8": (b'{"input": "\xff\xfe"}', None),
    "nested past reason": (b'{"input":' + b"[" * 100_000, None),
    "no body": (b"", None),
    "not an object": (b"[1, 2]", None),
    "no input": (b"{}", "input"),
    "a lone surrogate": (b'{"input": "\\ud800"}', None),
    "input null": (b'{"input": null}', "input"),
    "input a number": (b'{"input": 5}', "input"),
    "input an object": (b'{"input": {}}', "input"),
    "input of floats": (b'{"input": [1.5]}', "input"),
    "input of booleans": (b'{"input": [true]}', "input"),
    "no inputs": (b'{"input": []}', "input"),
    "an empty list of ids": (b'{"input": [[]]}', "input"),
    "texts and ids": (b'{"input": ["hello", 5]}', "input"),
    "ids and lists": (b'{"input": [5, [5]]}', "input"),
    "lists of lists": (b'{"input": [[[5]]]}', "input"),
    "a negative id": (b'{"input": [5, -1]}', "input"),
    "an id out of the vocabulary": (b'{"input": [[5], [100000]]}', "input"),
    "an id past 64 bits": (b'{"input": [123456789012345678901234567890]}', "input"),
    "an empty text without special tokens": (b'{"input": "", "add_special_tokens": false}', "input"),
    "dimensions 0": (b'{"input": "hello", "dimensions": 0}', "dimensions"),
    "dimensions negative": (b'{"input": "hello", "dimensions": -1}', "dimensions"),
    "dimensions too large": (b'{"input": "hello", "dimensions": 9}', "dimensions"),
    "dimensions a text": (b'{"input": "hello", "dimensions": "three"}', "dimensions"),
    "an unknown encoding": (b'{"input": "hello", "encoding_format": "hex"}', "encoding_format"),
    "an unknown type": (b'{"input": "hello", "embed_dtype": "int4"}', "embed_dtype"),
    "bits of 3 dimensions": (b'{"input": "hello", "embed_dtype": "binary", "dimensions": 3}', "embed_dtype"),
    "truncation to 0": (b'{"input": "hello", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens"),
    "truncation to -2": (b'{"input": "hello", "truncate_prompt_tokens": -2}', "truncate_prompt_tokens"),
    "truncation past the model": (b'{"input": "hello", "truncate_prompt_tokens": 65}', "truncate_prompt_tokens"),
    "truncation to special tokens": (b'{"input": "hello", "truncate_prompt_tokens": 2}', "truncate_prompt_tokens"),
    "truncation of neither side": (b'{"input": "hello", "truncation_side": "top"}', "truncation_side"),
    "an unknown prompt": (b'{"input": "hello", "prompt_name": "poem"}', "prompt_name"),
    "priority a text": (b'{"input": "hello", "priority": "high"}', "priority"),
}

JSON = {"Content-Type": "application/json"}


async def assert_still_serving(client: httpx.AsyncClient, service: Service) -> None:
    assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    assert_idle(service)


@each(("body", "param"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_bad_input_is_400_in_the_dialect_s_shape(client, service, body, param):
    answer = await client.post("/v1/embeddings", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["message"]
    assert error["param"] == param
    assert answer.headers["x-request-id"]
    await assert_still_serving(client, service)


MESSAGES = {
    "an unknown encoding": (
        b'{"input": "a", "encoding_format": "hex"}',
        ": it should be 'float', 'base64', 'bytes' or 'bytes_only' (literal_error)",
    ),
    "neither side": (b'{"input": "a", "truncation_side": "top"}', ": it should be 'left' or 'right' (literal_error)"),
    "no body": (b"", "The body is empty; it must be a JSON object."),
    "blanks": (b" \n\t ", "The body is empty; it must be a JSON object."),
    "half a body": (b'{"input": "hello', "The body is not valid JSON: it ends in the middle of a value."),
    "something else": (b"input=hello", "The body is not valid JSON: "),
    "a byte order mark and no more": (b"\xef\xbb\xbf", "The body is empty; it must be a JSON object."),
    "too many inputs": (
        b'{"input": [' + b'"a",' * 2048 + b'"a"]}',
        "2049 inputs are more than the 2048 that a request may have (--max-inputs-per-request).",
    ),
    "a wide truncation": (
        b'{"input": "a", "truncate_prompt_tokens": 65}',
        "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
    ),
    "another model": (b'{"input": "a", "model": "b"}', "The model `b` does not exist. This server has: "),
}


@each(("body", "message"), MESSAGES.values(), ids=MESSAGES)
async def test_messages_are_those_that_clients_know(client, body, message):
    answer = await client.post("/v1/embeddings", content=body, headers=JSON)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


async def test_one_bad_input_among_good_ones_fails_the_request_whole(client, service):
    answer = await client.post("/v1/embeddings", json={"input": [[5]] * 300 + [[100_000]] + [[5]] * 300})
    assert answer.status_code == 400
    assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    await wait_idle(service)  # good inputs that were being computed


async def test_an_over_long_input_is_refused_with_both_lengths(client, service):
    for given, length in (([7] * 65, "65"), ("hello " * 63, "65"), ("hello " * 100_000, "more than")):
        answer = await client.post("/v1/embeddings", json={"input": given})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f"This model's maximum context length is 64 tokens. However, an input has {length}")
        assert "Please reduce the length of the input" in message
    assert (await client.post("/v1/embeddings", json={"input": "hello " * 62})).status_code == 200
    await assert_still_serving(client, service)


async def test_ids_of_another_vocabulary_name_the_setting_that_sends_them(client):
    answer = await client.post("/v1/embeddings", json={"input": [[100_257]]})
    assert "check_embedding_ctx_length=False" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_that_is_not_json_is_415(client, service, kind):
    answer = await client.post("/v1/embeddings", content=b'{"input": "hello"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert answer.json()["error"]["type"] == "UnsupportedMediaType"
    await assert_still_serving(client, service)


async def test_an_unknown_model_is_404(client, service):
    assert (
        "text-embedding-3-small"
        in (await refused(client, "/v1/embeddings", {"input": "hello", "model": "text-embedding-3-small"}, 404))[
            "message"
        ]
    )
    assert (await client.get("/v1/models/none")).status_code == 404
    await assert_still_serving(client, service)


async def test_unknown_routes_and_methods_keep_the_shape(client):
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    answer = await client.get("/v1/embeddings")
    assert answer.status_code == 405
    assert "POST" in answer.headers["allow"]
    assert answer.json()["error"]["code"] == 405


async def test_a_body_past_the_limit_is_413(client, service):
    answer = await client.post("/v1/embeddings", content=b'"' + b"x" * 50_000_000, headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "PayloadTooLarge"
    await assert_still_serving(client, service)


async def test_a_body_past_the_limit_without_a_declared_length_is_413(client, service):
    async def chunks():
        for _ in range(40):
            yield b"x" * 1_000_000

    answer = await client.post("/v1/embeddings", content=chunks(), headers=JSON)
    assert answer.status_code == 413
    await assert_still_serving(client, service)


async def test_megabytes_are_not_sent_back(client, service):
    for field in ("model", "prompt_name", "encoding_format", "prompt"):
        answer = await client.post("/v1/embeddings", json={"input": "hello", field: "x" * 2_000_000})
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000
    await assert_still_serving(client, service)


async def test_too_many_inputs_are_400(client, service):
    assert "2048" in (await refused(client, "/v1/embeddings", {"input": [[5]] * 2049}))["message"]
    await assert_still_serving(client, service)


@pytest.mark.parametrize("header", ["soon", "-1", "0", "nan"])
async def test_a_deadline_that_is_no_number_of_seconds_is_400(client, header):
    answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers={"X-Request-Timeout": header})
    assert answer.status_code == 400


async def test_an_unforeseen_error_is_500_with_the_request_s_id(client, service, monkeypatch, caplog):
    def broken(tokens):
        raise KeyError("surprise")

    monkeypatch.setattr(type(service.default.engine), "admit", broken)
    answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers={"X-Request-Id": "abc"})
    assert answer.status_code == 500
    assert "abc" in answer.json()["error"]["message"]
    assert "surprise" not in answer.text
    assert "Traceback" in caplog.text


async def test_without_the_key_only_probes_are_answered(config, scripted):
    locked = attrs.evolve(config, network=attrs.evolve(config.network, api_key="s3cret"))
    async with serving(locked, scripted) as (_service, client):
        for path in ("/livez", "/health", "/ping", "/readyz", "/"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("/ping")).status_code == 200
        for path in ("/v1/models", "/metrics", "/load", "/version", "/nothing"):
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer nope", "nope", "Bearer", "Bearer s3cret2", "Bearer \xe4"):
            headers = {"Authorization": wrong.encode("latin-1")}
            answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers=headers)
            assert answer.status_code == 401, wrong
        for path, fields in {
            "/v1/embeddings": {"error", "detail"},
            "/rerank": {"error", "detail", "error_type"},
            "/v2/rerank": {"id", "message", "error"},
            "/predict": {"error", "error_type"},
        }.items():  # whose client it is, only the body would tell where several share a path
            assert (await client.post(path, json={})).json().keys() == fields, path
        for right in ("Bearer s3cret", "bearer s3cret", "s3cret"):
            headers = {"Authorization": right}
            answer = await client.post("/v1/embeddings", json={"input": "hello"}, headers=headers)
            assert answer.status_code == 200, right

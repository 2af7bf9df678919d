"""The OpenAI routes over real sockets; the runner is scripted, so every answer is known."""

import json

import attrs
import numpy as np
import pytest

from tests.api.scripted_models import ids_of, vector_of
from tests.api.serving import post, refused, serving, vectors
from tests.model_folders import VOCABULARY
from trio_pool_serve.types import CopiedBatch, Embed


async def test_answers_keep_the_order_of_a_large_request(client):
    words = [f"w{n % 200}" for n in range(700)]
    assert [vector[2:4] for vector in await vectors(client, input=[[VOCABULARY[word]] for word in words])] == [
        [VOCABULARY[word]] * 2 for word in words
    ]


async def test_the_metadata_of_bytes_is_json_whatever_the_id(client):
    body = {"input": "hello", "encoding_format": "bytes", "request_id": '😀 "quoted"\r\nX: y'}
    answer = await client.post("/v1/embeddings", json=body)
    assert json.loads(answer.headers["metadata"])["id"] == 'embd-😀 "quoted"\r\nX: y'
    assert "x" not in answer.headers


@pytest.mark.parametrize("encoding_format", ["float", "base64", "bytes"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "float16"])
async def test_numbers_too_large_for_the_type_are_refused(client, scripted, dtype, encoding_format):
    scripted.on_launch = lambda batch: CopiedBatch([(np.full(8, 1e5, dtype=np.float32),)] * len(batch.requests))
    error = await refused(client, input=[7, 8], embed_dtype=dtype, encoding_format=encoding_format)
    assert error["param"] == "embed_dtype"
    assert f"too large for {dtype}" in error["message"]


async def test_numbers_and_truth_values_may_be_strings(client, scripted):
    assert await vectors(client, input="hello", dimensions="3") == [vector_of("hello", 3)]
    assert await vectors(client, input=[7, 8, 9], truncate_prompt_tokens="2", priority="-1") == [vector_of([7, 8])]
    for false in ("false", "False", "0", 0):
        assert await vectors(client, input="hello", add_special_tokens=false) == [vector_of(ids_of("hello")[1:-1])]
        await vectors(client, input="hello", normalize=false)
        assert scripted.batches[-1].requests[0].params == (Embed(normalize=False),)


async def test_server_timing_names_every_stage(client):
    answer = await client.post("/v1/embeddings", json={"input": ["hello"] * 5})
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(stages) == ["render", "queue", "forward", "copy", "encode", "total"]
    assert float(stages["total"]) >= float(stages["render"]) > 0
    assert all(float(value) >= 0 for value in stages.values())


async def test_unknown_fields_are_ignored_unless_requests_are_strict(client, config, scripted):
    body = {"input": "hello", "no_such_field": 1}
    await post(client, **body)
    strict = attrs.evolve(config, network=attrs.evolve(config.network, strict_requests=True))
    async with serving(strict, scripted) as (_service, other):
        assert (await refused(other, "/v1/embeddings", body))["param"] == "no_such_field"
        await post(other, input="hello")

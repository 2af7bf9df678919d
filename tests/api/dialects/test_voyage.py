"""Voyage's routes over real sockets; the runner is scripted, so every answer is known."""

import base64

import numpy as np
import pytest

from tests.api.scripted_models import LONG, PROMPTS, Able, array_of, served_as, vector_of
from tests.api.serving import post, refused, vectors
from tests.conftest import assert_idle
from trio_pool_serve.api.fields.encodings import as_dtype

DOCUMENTS = ["w1", "hello world", "hello"]
"""Read after "passage :", as queries are after "query :": each shares three tokens with any query."""

AS_THE_CLIENT_SENDS = {
    "input_type": None,
    "truncation": True,
    "output_dtype": None,
    "output_dimension": None,
    "encoding_format": "base64",
}

service = served_as(Able(), prompts=PROMPTS)


# -- embeddings -------------------------------------------------------------------------------------------


async def test_the_client_s_request_has_the_answer_it_reads(client, config):
    answer = await post(client, input=["hello", "w1"], **AS_THE_CLIENT_SENDS)
    assert answer["object"] == "list"
    assert answer["model"] == config.models[0]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
    found = [np.frombuffer(base64.b64decode(item["embedding"]), np.float32).tolist() for item in answer["data"]]
    assert found == [vector_of("hello"), vector_of("w1")]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "embedding"), (1, "embedding")]


@pytest.mark.parametrize("dtype", ["float", "int8", "uint8", "binary", "ubinary"])
async def test_output_dtype_chooses_what_is_encoded(client, dtype):
    expected = as_dtype(array_of("hello"), "float32" if dtype == "float" else dtype)
    assert await vectors(client, input="hello", output_dtype=dtype) == [expected.tolist()]
    (encoded,) = await vectors(client, input="hello", output_dtype=dtype, encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded), expected.dtype).tolist() == expected.tolist()


async def test_long_texts_are_cut_unless_truncation_is_off(client, service):
    cut = [vector_of(" ".join(LONG.split()[:62]))]
    assert await vectors(client, input=LONG, truncation=True) == cut
    assert await vectors(client, input=LONG, truncation=None, input_type="clustering") == cut
    assert await vectors(client, input=LONG, output_dtype="float") == cut
    for fields in ({"truncation": False}, {"truncation": None}, {"truncation": None, "input_type": None}):
        answer = await client.post("/v1/embeddings", json={"input": LONG, **fields})
        assert answer.status_code == 400
        assert set(answer.json()) == {"detail", "error"}
        assert "maximum context length is 64 tokens" in answer.json()["detail"]
    assert_idle(service)


async def test_without_voyage_s_fields_a_long_input_is_refused(client):
    assert (await client.post("/v1/embeddings", json={"input": LONG})).status_code == 400


# -- rerank -----------------------------------------------------------------------------------------------


async def test_documents_come_best_first_under_data(client, config, service):
    body = {"query": "hello world", "documents": DOCUMENTS, "top_k": None, "truncation": True}
    assert await post(client, "/v1/rerank", **body) == {
        "object": "list",
        "data": [
            {"index": 1, "relevance_score": 5.0},
            {"index": 2, "relevance_score": 4.0},
            {"index": 0, "relevance_score": 3.0},
        ],
        "model": config.models[0],
        "usage": {"total_tokens": 6 + 5 + 6 + 5},
    }
    assert_idle(service)


async def test_the_best_are_told_with_their_texts_if_asked_for(client):
    body = {"query": "hello world", "documents": DOCUMENTS, "top_k": 2, "return_documents": True}
    assert (await post(client, "/v1/rerank", **body))["data"] == [
        {"index": 1, "relevance_score": 5.0, "document": "hello world"},
        {"index": 2, "relevance_score": 4.0, "document": "hello"},
    ]
    assert await post(client, "/v1/rerank", **{**body, "top_k": "2", "return_documents": "true"}) == await post(
        client, "/v1/rerank", **body
    )
    silent = await post(client, "/v1/rerank", **{**body, "top_k": 100, "return_documents": None})
    assert [set(item) for item in silent["data"]] == [{"index", "relevance_score"}] * 3


async def test_long_documents_are_cut_unless_truncation_is_off(client, service):
    body = {"query": "hello", "documents": [f"{LONG} hello"]}
    for fields in ({"truncation": True}, {"truncation": None}, {"top_k": None}, {"top_k": None, "truncation": None}):
        answer = await post(client, "/v1/rerank", **fields, **body)
        assert answer["data"] == [{"index": 0, "relevance_score": 3.0}]
    error = await refused(client, "/v1/rerank", truncation=False, **body)
    assert "maximum context length is 64 tokens" in error["message"]
    assert_idle(service)

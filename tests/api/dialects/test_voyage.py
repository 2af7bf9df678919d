"""Voyage's routes over real sockets; the runner is scripted, so every answer is known."""

import base64

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import LONG, Able, array_of, become, vector_of
from tests.api.serving import post, vectors
from tests.conftest import assert_idle
from tests.tables import each
from trio_pool_serve.api.fields.encodings import as_dtype
from trio_pool_serve.service import Service

DOCUMENTS = ["w1", "hello world", "hello"]
"""Read after "passage :", as queries are after "query :": each shares three tokens with any query."""

AS_THE_CLIENT_SENDS = {
    "input_type": None,
    "truncation": True,
    "output_dtype": None,
    "output_dimension": None,
    "encoding_format": "base64",
}


@pytest.fixture
async def service(service: Service) -> Service:
    become(service, Able())
    return service


async def refused(client: httpx.AsyncClient, path: str = "/v1/embeddings", status: int = 400, **body) -> dict:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"detail", "error"}
    assert answer.json()["detail"] == answer.json()["error"]["message"]
    return answer.json()["error"]


# -- embeddings -------------------------------------------------------------------------------------------


async def test_the_client_s_request_has_the_answer_it_reads(client, config):
    answer = await post(client, input=["hello", "w1"], **AS_THE_CLIENT_SENDS)
    assert answer["object"] == "list"
    assert answer["model"] == config.models[0]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": 0}
    found = [np.frombuffer(base64.b64decode(item["embedding"]), np.float32).tolist() for item in answer["data"]]
    assert found == [vector_of("hello"), vector_of("w1")]
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "embedding"), (1, "embedding")]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
async def test_output_dtype_chooses_what_is_encoded(client, dtype):
    expected = as_dtype(array_of("hello"), dtype)
    assert await vectors(client, input="hello", output_dtype=dtype) == [expected.tolist()]
    (encoded,) = await vectors(client, input="hello", output_dtype=dtype, encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded), expected.dtype).tolist() == expected.tolist()


async def test_output_dtype_float_is_float32(client):
    assert await vectors(client, input="hello", output_dtype="float") == [vector_of("hello")]


@pytest.mark.parametrize(
    ("purpose", "read"),
    [
        ("query", "query : hello"),
        ("document", "passage : hello"),
        ("search_document", "passage : hello"),
        ("classification", "hello hello"),
        ("clustering", "hello"),
        (None, "hello"),
    ],
)
async def test_texts_are_read_for_what_they_are_for(client, purpose, read):
    assert await vectors(client, input="hello", input_type=purpose) == [vector_of(read)]


async def test_a_prompt_that_the_client_has_chosen_itself_stays(client):
    expected = [vector_of("w1 hello")]
    assert await vectors(client, input="hello", input_type="query", prompt="w1 ") == expected
    named = await vectors(client, input="hello", input_type="classification", prompt_name="query")
    assert named == [vector_of("query : hello")]


async def test_long_texts_are_cut_unless_truncation_is_off(client, service):
    cut = [vector_of(" ".join(LONG.split()[:62]))]
    assert await vectors(client, input=LONG, truncation=True) == cut
    assert await vectors(client, input=LONG, truncation=None, input_type="clustering") == cut
    assert await vectors(client, input=LONG, output_dtype="float") == cut
    for fields in ({"truncation": False}, {"truncation": None}, {"truncation": None, "input_type": None}):
        error = await refused(client, input=LONG, **fields)
        assert "maximum context length is 64 tokens" in error["message"]
    assert_idle(service)


async def test_fields_of_others_hold_beside_them(client):
    marked = {"input_type": None}
    assert await vectors(client, input="hello", dimensions=3, **marked) == [vector_of("hello", 3)]
    assert await vectors(client, input=LONG, truncate_prompt_tokens=4, **marked) == [vector_of("w0 w1")]
    assert await vectors(client, input=[7, 8], **marked) == [vector_of([7, 8])]
    expected = as_dtype(array_of("hello"), "int8").tolist()
    assert await vectors(client, input="hello", embed_dtype="int8", **marked) == [expected]
    assert await vectors(client, input=[{"text": "hello"}], task="classification", **marked) == [
        vector_of("hello hello")
    ]
    await refused(client, input=LONG, truncate=False, **marked)


async def test_output_dimension_cuts_the_vector(client):
    for three in (3, "3"):
        assert await vectors(client, input="hello", output_dimension=three) == [vector_of("hello", 3)]


async def test_without_voyage_s_fields_a_request_is_openai_s(client):
    answer = await client.post("/v1/embeddings", json={"input": LONG})
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}


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


async def test_many_documents_keep_their_texts(client):
    documents = [f"w{n}" for n in range(199)] + ["hello"]
    answer = await post(client, "/v1/rerank", query="hello", documents=documents, top_k=None, return_documents=True)
    assert answer["data"][0]["document"] == "hello"
    assert [documents[item["index"]] for item in answer["data"]] == [item["document"] for item in answer["data"]]


# -- what is wrong ----------------------------------------------------------------------------------------

RERANK = {"query": "a", "documents": ["b"], "top_k": 1}
WRONG = {
    "input null": ("/v1/embeddings", {"input": None, "input_type": None}, "input"),
    "no input": ("/v1/embeddings", {"input": [], "input_type": None}, "input"),
    "an unknown purpose": ("/v1/embeddings", {"input": "a", "input_type": "poem"}, "input_type"),
    "an unknown type": ("/v1/embeddings", {"input": "a", "output_dtype": "int4"}, "output_dtype"),
    "an unknown format": (
        "/v1/embeddings",
        {"input": "a", "truncation": True, "encoding_format": "hex"},
        "encoding_format",
    ),
    "bits of 3": ("/v1/embeddings", {"input": "a", "output_dtype": "binary", "output_dimension": 3}, "output_dtype"),
    "dimension 0": ("/v1/embeddings", {"input": "a", "output_dimension": 0}, "output_dimension"),
    "dimension 9": ("/v1/embeddings", {"input": "a", "output_dimension": 9}, "output_dimension"),
    "no documents": ("/v1/rerank", {**RERANK, "documents": []}, "documents"),
    "documents of objects": ("/v1/rerank", {**RERANK, "documents": [{"text": "b"}]}, "documents"),
    "too many documents": ("/v1/rerank", {**RERANK, "documents": ["b"] * 2049}, "documents"),
    "top_k 0": ("/v1/rerank", {**RERANK, "top_k": 0}, "top_k"),
}


@each(("path", "body", "param"), WRONG.values(), ids=WRONG)
async def test_bad_input_is_400_and_names_the_field(client, service, path, body, param):
    error = await refused(client, path, **body)
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert_idle(service)


async def test_a_body_without_a_declared_type_is_taken_for_json(client):
    answer = await client.post("/v1/rerank", content=b'{"query": "a", "documents": ["b"], "top_k": 1}')
    assert "content-type" not in answer.request.headers
    assert answer.status_code == 200

"""Values that are given under several names, or beside fields that leave them nothing to do."""

import attrs
import pytest

from tests.api.scripted_models import PROMPTS, Able, SparseOnly, become, serve_as
from tests.tables import each
from trio_pool_serve.api.fields.field_values import the_same
from trio_pool_serve.types import Classify

EMBED, RERANK = {"input": "hello"}, {"query": "a", "documents": ["b"]}

CONFLICTS = [
    ("/v1/embeddings", {**EMBED, "normalize": True, "normalized": False}, "normalized"),
    ("/v1/embeddings", {**EMBED, "task": None, "use_activation": True, "normalized": False}, "normalized"),
    ("/v1/embeddings", {**EMBED, "dimensions": 3, "output_dimension": 4}, "dimensions"),
    ("/v1/embeddings", {**EMBED, "truncation": True, "truncate": False}, "truncation"),
    ("/v1/embeddings", {**EMBED, "truncate": False, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {**EMBED, "truncation": False, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {**EMBED, "input_type": "query", "task": "code.query"}, "task"),
    ("/v1/embeddings", {**EMBED, "embedding_type": "binary", "embed_dtype": "int8"}, "embed_dtype"),
    ("/v1/embeddings", {**EMBED, "embedding_type": "float", "encoding_format": "bytes"}, "embedding_type"),
    ("/v1/embeddings", {**EMBED, "output_dtype": "int8", "embed_dtype": "uint8"}, "embed_dtype"),
    ("/v1/embeddings", {**EMBED, "output_dtype": "int8", "embedding_type": "float"}, "embedding_type"),
    ("/v1/rerank", {**RERANK, "top_k": 1, "top_n": 2}, "top_n"),
    ("/rerank", {**RERANK, "top_k": 1, "truncation": False, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
    ("/rerank", {**RERANK, "use_activation": True, "activation": False}, "activation"),
    ("/rerank", {**RERANK, "use_activation": True, "raw_scores": True}, "raw_scores"),
    ("/classify", {**EMBED, "use_activation": False, "raw_scores": False}, "raw_scores"),
    ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
    ("/pooling", {**EMBED, "task": "embed", "normalize": True, "activation": False}, "activation"),
    (
        "/v1/multimodalembeddings",
        {"inputs": [{"content": "a"}], "output_encoding": "base64", "encoding_format": "float"},
        "encoding_format",
    ),
]


@each(("path", "body", "param"), CONFLICTS)
async def test_fields_that_contradict_each_other_are_refused(client, service, path, body, param):
    become(service, Able())
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert param in error["message"]


async def test_names_of_one_thing_may_agree(client, service):
    become(service, Able())
    for path, body in [
        ("/v1/embeddings", {**EMBED, "normalize": True, "normalized": True, "use_activation": True}),
        ("/v1/embeddings", {**EMBED, "dimensions": 3, "output_dimension": "3"}),
        ("/v1/rerank", {**RERANK, "top_k": 1, "top_n": 1}),
        ("/rerank", {**RERANK, "use_activation": True, "raw_scores": False}),
    ]:
        assert (await client.post(path, json=body)).status_code == 200, body


SPARSE = {"input": "hello", "task": "sparse_embed"}


@each(
    ("body", "param"),
    [
        ({**SPARSE, "encoding_format": "base64"}, "encoding_format"),
        ({**SPARSE, "embed_dtype": "int8"}, "embed_dtype"),
        ({**SPARSE, "dimensions": 3}, "dimensions"),
        ({**SPARSE, "normalize": True}, "normalize"),
        ({**SPARSE, "use_activation": True}, "use_activation"),
    ],
)
async def test_weights_over_the_vocabulary_are_numbers_as_the_model_gives_them(client, service, body, param):
    serve_as(service, SparseOnly())
    plain = await client.post("/pooling", json={**SPARSE, "encoding_format": "float", "normalize": False})
    assert plain.status_code == 200, plain.text
    refused = await client.post("/pooling", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_infinity_s_raw_scores_are_the_logits_of_classify(client, service, scripted):
    become(service, Able())
    await client.post("/classify", json={"input": "hello", "raw_scores": True})
    assert scripted.batches[-1].requests[0].params == (Classify("raw"),)


INPUT_TYPES = [
    ("/v2/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_query"]),
    ("/v1/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_document"]),
    ("/v1/embeddings", EMBED, "task", ["retrieval.query", "text-matching", "separation", "code.passage", "qa.query"]),
    ("/v1/embeddings", EMBED, "input_type", ["query", "document", "passage", "clustering"]),
    ("/pooling", {**EMBED, "task": "embed"}, "input_type", ["query", "document"]),
    ("/v1/multimodalembeddings", {"inputs": [{"content": "hello"}]}, "input_type", ["query", "document"]),
]


@each(("path", "body", "param", "known"), INPUT_TYPES)
@pytest.mark.parametrize("unknown", ["nonsense", "retrieval.foo", ""])
async def test_an_unknown_input_type_is_refused_with_all_that_are_known(
    client, service, path, body, param, known, unknown
):
    become(service, Able())
    for name in {*known, *PROMPTS, None} - {"image"}:  # texts are none
        assert (await client.post(path, json={**body, param: name})).status_code == 200, name
    answer = await client.post(path, json={**body, param: unknown, "prompt_name": None})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} must be one of ")
    assert error["message"].endswith(f'; not "{unknown}".')
    for name in (*known, *PROMPTS):
        assert name in error["message"]


async def test_a_refusal_says_what_was_sent_but_for_the_texts_in_it(client, service):
    become(service, Able())
    for path, body, message in [
        (
            "/v1/embeddings",
            {**EMBED, "return_multivector": True},
            "return_multivector must be false or null, not true:",
        ),
        ("/rerank", {**RERANK, "rank_fields": ["title"]}, 'rank_fields must be ["text"] or [] or null, not a list:'),
        ("/rerank", {**RERANK, "max_chunks_per_doc": 10}, "max_chunks_per_doc must be 1 or null, not 10:"),
        ("/v1/classify", {"inputs": ["a"], "preset": "mine"}, 'preset must be "" or null, not "mine":'),
        (
            "/v1/classify",
            {"inputs": ["a"], "examples": [{"text": "private"}]},
            "examples must be [] or null, not a list:",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "private"}, "queries must be left out, not a string:"),
    ]:
        assert message in (await client.post(path, json=body)).json()["error"]["message"]


async def test_a_refusal_repeats_the_beginning_of_a_long_text_only(client, service):
    become(service, Able())
    for path, body, param, known in INPUT_TYPES:
        del known
        answer = await client.post(path, json={**body, param: "x" * 2**20})
        assert answer.status_code == 400
        assert len(answer.content) < 2000, path


@attrs.frozen
class Named:
    here: int = 1


@pytest.mark.unit
def test_a_name_that_a_request_does_not_have_is_no_name_of_anything():
    assert the_same(Named(), "here") == 1
    with pytest.raises(AttributeError, match="hree"):
        the_same(Named(), "here", "hree")

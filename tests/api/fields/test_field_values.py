"""Values that are given under several names, or beside fields that leave them nothing to do."""

import attrs
import pytest

from tests.api.scripted_models import PROMPTS, Able, SparseOnly, become, ids_of, serve_as
from tests.api.serving import post, refused
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from trio_pool_serve.api.fields.field_values import the_same

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
    error = await refused(client, path, body)
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
        await post(client, path, **body)


SPARSE = {"input": "hello", "task": "sparse_embed"}


@each(
    ("body", "param"),
    [
        ({**SPARSE, "encoding_format": "base64"}, "encoding_format"),
        ({**SPARSE, "embed_dtype": "int8"}, "embed_dtype"),
        ({**SPARSE, "dimensions": 3}, "dimensions"),
        ({**SPARSE, "normalize": True}, "normalize"),
    ],
)
async def test_weights_over_the_vocabulary_are_numbers_as_the_model_gives_them(client, service, body, param):
    serve_as(service, SparseOnly())
    await post(client, "/pooling", **SPARSE, encoding_format="float", normalize=False)
    assert (await refused(client, "/pooling", body))["param"] == param


INPUT_TYPES = [
    ("/v2/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_query"]),
    ("/v1/embed", {"texts": ["hello"]}, "input_type", ["classification", "clustering", "image", "search_document"]),
    ("/v1/embeddings", EMBED, "task", ["retrieval.query", "text-matching", "separation", "code.passage", "qa.query"]),
    ("/v1/embeddings", EMBED, "input_type", ["query", "document", "passage", "clustering"]),
    ("/pooling", {**EMBED, "task": "embed"}, "input_type", ["query", "document"]),
    ("/v1/multimodalembeddings", {"inputs": [{"content": "hello"}]}, "input_type", ["query", "document"]),
]


SIDES = {
    **dict.fromkeys(["search_query", "retrieval.query"], "query : hello"),
    **dict.fromkeys(["search_document", "passage", "retrieval.passage"], "passage : hello"),
}


def read_last(scripted: ScriptedRunner) -> list[int]:
    return scripted.batches[-1].requests[0].prompt.token_ids.tolist()


@each(("path", "body", "param", "known"), INPUT_TYPES)
async def test_texts_get_the_model_s_prompt_of_that_name_or_for_that_side(
    client, service, scripted, path, body, param, known
):
    become(service, Able())
    for name in {*known, *PROMPTS, None} - {"image"}:  # texts are none
        await post(client, path, **body, **{param: name})
        assert read_last(scripted) == ids_of(SIDES.get(name, f"{PROMPTS.get(name, '')}hello")), name


async def test_a_prompt_that_the_client_has_chosen_stays(client, service, scripted):
    become(service, Able())
    for chosen, read in [
        ({"input_type": "query", "prompt": "w1 "}, "w1 hello"),
        ({"task": "classification", "prompt": "w1 "}, "w1 hello"),
        ({"input_type": "classification", "prompt_name": "query"}, "query : hello"),
    ]:
        await post(client, **EMBED, **chosen)
        assert read_last(scripted) == ids_of(read)


@each(("path", "body", "param", "known"), INPUT_TYPES)
async def test_an_unknown_input_type_is_refused_with_all_that_are_known(client, service, path, body, param, known):
    become(service, Able())
    for unknown in ("nonsense", "retrieval.foo", ""):
        error = await refused(client, path, {**body, param: unknown, "prompt_name": None})
        assert error["param"] == param
        assert error["message"].startswith(f"{param} must be one of ")
        assert error["message"].endswith(f", not '{unknown}'.")
        assert all(name in error["message"] for name in (*known, *PROMPTS))


async def test_a_refusal_says_what_was_sent_but_for_the_texts_in_it(client, service):
    become(service, Able())
    for path, body, message in [
        (
            "/v1/embeddings",
            {**EMBED, "return_multivector": True},
            "return_multivector must be false or null, not true:",
        ),
        ("/rerank", {**RERANK, "rank_fields": ["title"]}, 'rank_fields must be ["text"], [] or null, not a list:'),
        ("/rerank", {**RERANK, "max_chunks_per_doc": 10}, "max_chunks_per_doc must be 1 or null, not 10:"),
        ("/v1/classify", {"inputs": ["a"], "preset": "mine"}, "preset must be '' or null, not 'mine':"),
        ("/v1/classify", {"inputs": ["a"], "examples": [{"text": "x"}]}, "examples must be [] or null, not a list:"),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "queries": "private"},
            "Leave out `queries`: it cannot be sent with text_1 and text_2.",
        ),
    ]:
        assert message in (await refused(client, path, body))["message"]


async def test_a_refusal_repeats_the_beginning_of_a_long_text_only(client, service):
    become(service, Able())
    fields = [(path, body, param) for path, body, param, _ in INPUT_TYPES]
    fields += [("/embed", {"inputs": "hello"}, name) for name in ("model", "prompt_name", "truncation_direction")]
    for path, body, param in fields:
        answer = await client.post(path, json={**body, param: "x" * 2**20})
        assert answer.status_code in (400, 404, 422)
        assert len(answer.content) < 2000, path


@attrs.frozen
class Named:
    here: int = 1


@pytest.mark.unit
def test_a_name_that_a_request_does_not_have_is_no_name_of_anything():
    assert the_same(Named(), "here") == 1
    with pytest.raises(AttributeError, match="hree"):
        the_same(Named(), "here", "hree")

"""Cohere's routes over real sockets; the runner is scripted, so every answer is known."""

import base64

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import LONG, Able, array_of, become, vector_of
from tests.api.serving import post
from tests.conftest import assert_idle
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.api.fields.encodings import as_dtype
from trio_pool_serve.models.classification import SequenceClassifier
from trio_pool_serve.service import Service

VERSION_1 = {"version": "1"}
VERSION_2 = {"version": "2"}
DOCUMENTS = ["w1", "hello world", "hello"]
"""Read after "passage :", as queries are after "query :": each shares three tokens with any query."""


@pytest.fixture
async def service(service: Service) -> Service:
    become(service, Able())
    return service


async def floats(client: httpx.AsyncClient, **body) -> list[list[float]]:
    return (await post(client, "/v2/embed", **body))["embeddings"]["float"]


async def refused(client: httpx.AsyncClient, path: str, status: int = 400, **body) -> str:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert_cohere_s(answer)
    return answer.json()["message"]


def assert_cohere_s(answer: httpx.Response) -> None:
    """An error is Cohere's, with OpenAI's beside it, which says the same."""
    body = answer.json()
    assert set(body) == {"id", "message", "error"}
    assert body["id"] == answer.headers["x-request-id"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == body["message"]
    assert body["error"]["code"] == answer.status_code


# -- embed ------------------------------------------------------------------------------------------------


async def test_embeddings_come_by_type(client):
    answer = await client.post("/v2/embed", json={"texts": ["hello", "w1 w2"]}, headers={"X-Request-Id": "mine"})
    assert answer.json() == {
        "id": "mine",
        "embeddings": {"float": [vector_of("hello"), vector_of("w1 w2")]},
        "texts": ["hello", "w1 w2"],
        "meta": {"api_version": VERSION_2, "billed_units": {"input_tokens": 7, "image_tokens": 0}},
        "response_type": "embeddings_by_type",
    }


async def test_version_1_has_plain_vectors_unless_types_are_asked_for(client):
    plain = await post(client, "/v1/embed", texts=["hello"])
    assert plain["response_type"] == "embeddings_floats"
    assert plain["embeddings"] == [vector_of("hello")]
    assert plain["texts"] == ["hello"]
    assert isinstance(plain["id"], str)
    billed = {"input_tokens": 3, "image_tokens": 0}
    assert plain["meta"] == {"api_version": VERSION_1, "billed_units": billed}
    typed = await post(client, "/v1/embed", texts=["hello"], embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == {"float": [vector_of("hello")]}


async def test_every_type_that_is_asked_for_is_there(client):
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    found = (await post(client, "/v2/embed", texts=["hello"], embedding_types=types))["embeddings"]
    vector = array_of("hello")
    assert list(found) == types
    assert found["float"] == [vector.tolist()]
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert found[name] == [as_dtype(vector, name).tolist()], name
    assert np.frombuffer(base64.b64decode(found["base64"][0]), "<f4").tolist() == vector.tolist()


async def test_the_texts_of_one_input_are_one_text(client):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    answer = await post(client, "/v2/embed", inputs=[{"content": parts}, {"content": parts[:1]}])
    assert answer["embeddings"]["float"] == [vector_of("hello world"), vector_of("hello")]
    assert answer["texts"] == ["hello\nworld", "hello"]


@pytest.mark.parametrize(
    ("purpose", "read"),
    [
        ("search_query", "query : hello"),
        ("search_document", "passage : hello"),
        ("classification", "hello hello"),
        ("clustering", "hello"),
        (None, "hello"),
    ],
)
async def test_texts_are_read_for_what_they_are_for(client, purpose, read):
    assert await floats(client, texts=["hello"], input_type=purpose) == [vector_of(read)]


async def test_output_dimension_cuts_the_vector(client):
    assert await floats(client, texts=["hello"], output_dimension=3) == [vector_of("hello", 3)]


async def test_long_texts_lose_the_end_that_is_named(client):
    whole = LONG.split()
    first, last = vector_of(" ".join(whole[:62])), vector_of(" ".join(whole[-62:]))
    assert await floats(client, texts=[LONG]) == [first]
    assert await floats(client, texts=[LONG], truncate="END") == [first]
    assert await floats(client, texts=[LONG], truncate="START") == [last]
    message = await refused(client, "/v2/embed", texts=[LONG], truncate="NONE")
    assert "maximum context length is 64 tokens" in message


async def test_max_tokens_limits_every_text(client):
    assert await floats(client, texts=[LONG], max_tokens=4) == [vector_of("w0 w1")]
    assert await floats(client, texts=[LONG], max_tokens=4, truncate="START") == [vector_of("w98 w99")]
    assert (await floats(client, texts=[LONG], max_tokens=100_000))[0][0] == 64
    assert await floats(client, texts=["w0 w1"], max_tokens=4, truncate="NONE") == [vector_of("w0 w1")]


async def test_a_text_that_must_not_be_cut_is_refused_past_max_tokens(client, service):
    message = await refused(client, "/v2/embed", texts=["hello", "w0 w1 w2"], max_tokens=4, truncate="NONE")
    assert message == "Text 1 has 5 tokens, more than max_tokens, 4."
    assert_idle(service)


async def test_a_request_of_many_texts_keeps_their_order(client):
    texts = [f"w{n % 200}" for n in range(300)]
    found = await post(client, "/v2/embed", texts=texts, embedding_types=["float", "base64"])
    assert found["embeddings"]["float"] == [vector_of(text) for text in texts]
    assert len(found["embeddings"]["base64"]) == 300


# -- rerank -----------------------------------------------------------------------------------------------


async def test_documents_come_best_first(client, service):
    body = {"query": "hello world", "documents": DOCUMENTS}
    (model,) = service.served
    answer = await client.post("/v2/rerank", json=body, headers={"X-Request-Id": "mine"})
    assert answer.json() == {
        "id": "mine",
        "results": [
            {"index": 1, "relevance_score": 5.0},
            {"index": 2, "relevance_score": 4.0},
            {"index": 0, "relevance_score": 3.0},
        ],
        "meta": {"api_version": VERSION_2, "billed_units": {"search_units": 1}},
        "model": model,
        "usage": {"prompt_tokens": 22, "total_tokens": 22, "completion_tokens": 0},
    }
    assert_idle(service)


async def test_only_the_best_are_told(client):
    for top_n, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2, 0]), (100, [1, 2, 0]), (None, [1, 2, 0]), (0, [1, 2, 0])):
        answer = await post(client, "/v2/rerank", query="hello world", documents=DOCUMENTS, top_n=top_n)
        assert [result["index"] for result in answer["results"]] == expected


async def test_documents_may_have_fields_and_all_else_may_be_null(client):
    nulls = dict.fromkeys(["model", "top_n", "max_tokens_per_doc", "priority", "return_documents"])
    plain = await post(client, "/v2/rerank", query="hello", documents=DOCUMENTS)
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    fielded = await post(client, "/v2/rerank", query="hello", documents=objects, **nulls)
    not_asked_back = await post(client, "/v2/rerank", query="hello", documents=DOCUMENTS, return_documents=False)
    assert plain["results"] == fielded["results"] == not_asked_back["results"]


async def test_documents_are_returned_if_they_are_asked_for(client):
    plain = await post(client, "/v2/rerank", query="hello", documents=DOCUMENTS)
    for documents in (DOCUMENTS, [{"text": text} for text in DOCUMENTS]):
        asked_back = await post(client, "/v2/rerank", query="hello", documents=documents, return_documents=True)
        assert asked_back["results"] == [
            {**result, "document": {"text": DOCUMENTS[result["index"]]}} for result in plain["results"]
        ]


async def test_a_document_may_come_alone(client):
    (expected,) = (await post(client, "/v2/rerank", query="hello", documents=["hello"]))["results"]
    for document in ("hello", {"text": "hello"}):
        assert (await post(client, "/v2/rerank", query="hello", documents=document))["results"] == [expected]


async def test_numbers_and_truth_values_may_be_strings(client):
    assert await floats(client, texts=["hello"], output_dimension="3") == [vector_of("hello", 3)]
    assert await floats(client, texts=[LONG], max_tokens="4", priority="1") == [vector_of("w0 w1")]
    best = await post(
        client, "/v2/rerank", query="hello world", documents=DOCUMENTS, top_n="1", return_documents="true"
    )
    assert best["results"] == [{"index": 1, "relevance_score": 5.0, "document": {"text": "hello world"}}]


async def test_long_documents_lose_their_ends(client):
    document = f"{LONG} hello"
    for limit in (None, 0, 5, 100_000):
        answer = await post(client, "/v2/rerank", query="hello", documents=[document], max_tokens_per_doc=limit)
        assert answer["results"] == [{"index": 0, "relevance_score": 3.0}]
    whole = await post(client, "/v2/rerank", query="hello", documents=["w1 hello"], max_tokens_per_doc=2)
    assert whole["results"] == [{"index": 0, "relevance_score": 4.0}]
    cut = await post(client, "/v2/rerank", query="hello", documents=["w1 hello"], max_tokens_per_doc=1)
    assert cut["results"] == [{"index": 0, "relevance_score": 3.0}]


async def test_options_of_vllm_hold_on_rerank_too(client, scripted):
    await post(client, "/v2/rerank", query="hello", documents=[LONG], truncate_prompt_tokens=30)
    assert max(request.tokens for batch in scripted.batches for request in batch.requests) == 30
    scripted.batches.clear()
    await post(client, "/v2/rerank", query=LONG, documents=["hello"], max_tokens_per_query=5)
    assert max(request.tokens for batch in scripted.batches for request in batch.requests) == 5 + 4
    instructed = await post(client, "/v2/rerank", query="hello", documents=["world"], instruction="world world ")
    assert instructed["results"] == [{"index": 0, "relevance_score": 4.0}]


# -- classify ---------------------------------------------------------------------------------------------


async def test_classifications_are_of_the_model_s_own_labels(client, service):
    answer = await client.post("/v1/classify", json={"inputs": ["w1", "hello"]}, headers={"X-Request-Id": "mine"})
    total = float(array_of("hello")[1])
    assert answer.json()["id"] == "mine"
    assert answer.json()["meta"] == {"api_version": VERSION_1, "billed_units": {"classifications": 2}}
    first, second = answer.json()["classifications"]
    assert first["input"] == "w1"
    assert second == {
        "id": "mine-1",
        "input": "hello",
        "prediction": "long",
        "predictions": ["long"],
        "confidence": total,
        "confidences": [total],
        "labels": {"short": {"confidence": 3.0}, "long": {"confidence": total}},
        "classification_type": "single-label",
    }
    assert_idle(service)


async def test_labels_that_do_not_exclude_each_other_are_told_together(client, service, scripted):
    names, several = ("length", "sum", "first", "last", "zero"), "multi_label_classification"
    score_activation = "torch.nn.modules.activation.Sigmoid"
    become(service, SequenceClassifier(labels=names, problem_type=several, score_activation=score_activation))
    scripted.labels = len(names)
    (found,) = (await post(client, "/v1/classify", inputs=["hello"]))["classifications"]
    assert found["classification_type"] == "multi-label"
    assert found["predictions"] == ["length", "sum", "first", "last"]
    assert found["confidences"] == vector_of("hello", 4)
    assert found["prediction"] is found["confidence"] is None
    assert found["labels"]["zero"] == {"confidence": 0.0}


async def test_classify_cuts_long_texts_unless_told_not_to(client):
    for truncate in (None, "START", "END"):
        answer = await post(client, "/v1/classify", inputs=[LONG], truncate=truncate)
        assert answer["classifications"][0]["labels"]["short"] == {"confidence": 64.0}
    assert "maximum context length is 64 tokens" in await refused(
        client, "/v1/classify", inputs=[LONG], truncate="NONE"
    )


async def test_examples_and_presets_are_refused_rather_than_ignored(client):
    nothing = {"examples": [], "preset": None, "model": None, "truncate": None, "priority": None}
    await post(client, "/v1/classify", inputs=["hello"], **nothing)
    await post(client, "/v1/classify", inputs=["hello"], examples=None)
    examples = [{"text": "hello", "label": "greeting"}]
    assert "examples" in await refused(client, "/v1/classify", inputs=["hello"], examples=examples)
    assert "preset" in await refused(client, "/v1/classify", inputs=["hello"], preset="mine")


# -- tokens -----------------------------------------------------------------------------------------------


async def test_texts_become_tokens_and_tokens_texts(client):
    tokens = await post(client, "/v1/tokenize", text="hello world", model=None)
    ids = [VOCABULARY["hello"], VOCABULARY["world"]]
    meta = {"api_version": VERSION_1, "billed_units": {}}
    assert tokens == {"tokens": ids, "token_strings": ["hello", "world"], "meta": meta}
    assert await post(client, "/v1/detokenize", tokens=ids, model=None) == {"text": "hello world", "meta": meta}


async def test_no_text_has_no_tokens(client):
    assert (await post(client, "/v1/tokenize", text=""))["tokens"] == []
    assert (await post(client, "/v1/detokenize", tokens=[]))["text"] == ""


async def test_tokens_of_another_vocabulary_are_refused(client):
    for token in (-1, 100_000, 10**30):
        await refused(client, "/v1/detokenize", tokens=[token])


# -- what is wrong ----------------------------------------------------------------------------------------

WRONG = {
    "no texts": ("/v2/embed", {}, "texts"),
    "an empty list": ("/v2/embed", {"texts": []}, "texts"),
    "no inputs": ("/v2/embed", {"inputs": []}, "inputs"),
    "texts numbers": ("/v2/embed", {"texts": [5]}, "texts"),
    "texts and inputs": ("/v2/embed", {"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, ""),
    "an input without a part": ("/v2/embed", {"inputs": [{"content": []}]}, "no text"),
    "a part without text": ("/v2/embed", {"inputs": [{"content": [{"type": "text"}]}]}, "no text"),
    "an image part": ("/v2/embed", {"inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    "images": ("/v2/embed", {"images": ["data:image/png;base64,"]}, "texts only"),
    "images of version 1": ("/v1/embed", {"images": ["data:image/png;base64,"]}, "texts only"),
    "no images": ("/v2/embed", {"images": []}, "images"),
    "an empty image": ("/v2/embed", {"images": [""]}, "empty"),
    "texts and images": ("/v2/embed", {"texts": ["a"], "images": ["b"]}, "texts and images"),
    "too many images": ("/v2/embed", {"images": ["a"] * 2049}, "2048"),
    "the purpose of an image": ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "as images"),
    "a part of another kind": ("/v2/embed", {"inputs": [{"content": [{"type": "audio"}]}]}, "audio"),
    "an unknown type": ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, "int4"),
    "bits of 3": ("/v2/embed", {"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 3}, "of 8"),
    "dimension 0": ("/v2/embed", {"texts": ["a"], "output_dimension": 0}, "output_dimension"),
    "dimension 9": ("/v2/embed", {"texts": ["a"], "output_dimension": 9}, "output_dimension"),
    "an unknown end": ("/v2/embed", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
    "max_tokens 0": ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens"),
    "max_tokens 2": ("/v2/embed", {"texts": ["a"], "max_tokens": 2}, "leaves none"),
    "too many texts": ("/v2/embed", {"texts": ["a"] * 2049}, "2048"),
    "no query": ("/v2/rerank", {"documents": ["a"]}, "query"),
    "no documents field": ("/v2/rerank", {"query": "a"}, "documents"),
    "no documents": ("/v2/rerank", {"query": "a", "documents": []}, "nothing"),
    "a document without text": ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, "text"),
    "top_n below 0": ("/v2/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    "fewer tokens of a document than none": (
        "/v2/rerank",
        {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1},
        "max_tokens_per_doc",
    ),
    "too many documents": ("/v2/rerank", {"query": "a", "documents": ["a"] * 2049}, "2048"),
    "no inputs to classify": ("/v1/classify", {"inputs": []}, "inputs"),
    "inputs null": ("/v1/classify", {"inputs": None}, "inputs"),
    "too many inputs": ("/v1/classify", {"inputs": ["a"] * 2049}, "2048"),
    "no text to tokenise": ("/v1/tokenize", {"text": None}, "text"),
}


@each(("path", "body", "told"), WRONG.values(), ids=WRONG)
async def test_bad_input_is_400_in_cohere_s_shape(client, service, path, body, told):
    assert told in await refused(client, path, **body)
    assert_idle(service)

"""Cohere's routes over real sockets; the runner is scripted, so every answer is known."""

import base64

import httpx
import numpy as np

from tests.api.scripted_models import LONG, PROMPTS, Able, array_of, become, served_as, vector_of
from tests.api.serving import post, refused
from tests.conftest import assert_idle
from tests.model_folders import VOCABULARY
from trio_pool_serve.api.fields.encodings import as_dtype
from trio_pool_serve.models.classification import SequenceClassifier

VERSION_1 = {"version": "1"}
VERSION_2 = {"version": "2"}
DOCUMENTS = ["w1", "hello world", "hello"]
"""Read after "passage :", as queries are after "query :": each shares three tokens with any query."""

service = served_as(Able(), prompts=PROMPTS)


async def floats(client: httpx.AsyncClient, **body) -> list[list[float]]:
    return (await post(client, "/v2/embed", **body))["embeddings"]["float"]


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


async def test_long_texts_lose_the_end_that_is_named(client):
    whole = LONG.split()
    first, last = vector_of(" ".join(whole[:62])), vector_of(" ".join(whole[-62:]))
    assert await floats(client, texts=[LONG]) == [first]
    assert await floats(client, texts=[LONG], truncate="END") == [first]
    assert await floats(client, texts=[LONG], truncate="START") == [last]
    for path, field in (("/v2/embed", "texts"), ("/v1/classify", "inputs")):
        error = await refused(client, path, {field: [LONG], "truncate": "NONE"})
        assert "maximum context length is 64 tokens" in error["message"]
    labels = (await post(client, "/v1/classify", inputs=[LONG]))["classifications"][0]["labels"]
    assert labels["short"] == {"confidence": 64.0}


async def test_max_tokens_limits_every_text(client):
    assert await floats(client, texts=[LONG], max_tokens=4) == [vector_of("w0 w1")]
    assert await floats(client, texts=[LONG], max_tokens=4, truncate="START") == [vector_of("w98 w99")]
    assert (await floats(client, texts=[LONG], max_tokens=100_000))[0][0] == 64
    assert await floats(client, texts=["w0 w1"], max_tokens=4, truncate="NONE") == [vector_of("w0 w1")]
    body = {"texts": ["hello", "w0 w1 w2"], "max_tokens": 4, "truncate": "NONE"}
    assert (await refused(client, "/v2/embed", body))[
        "message"
    ] == "texts[1] has 5 tokens; the limit is 4 (max_tokens)."


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


async def test_documents_may_be_objects_or_come_alone_and_are_returned_if_they_are_asked_for(client):
    plain = (await post(client, "/v2/rerank", query="hello", documents=DOCUMENTS))["results"]
    for documents in (DOCUMENTS, [{"text": text, "title": "ignored"} for text in DOCUMENTS]):
        answer = await post(client, "/v2/rerank", query="hello", documents=documents, return_documents=True)
        assert answer["results"] == [{**result, "document": {"text": DOCUMENTS[result["index"]]}} for result in plain]
    (expected,) = (await post(client, "/v2/rerank", query="hello", documents=["hello"]))["results"]
    for document in ("hello", {"text": "hello"}):
        assert (await post(client, "/v2/rerank", query="hello", documents=document))["results"] == [expected]


async def test_long_documents_lose_their_ends(client):
    document = f"{LONG} hello"
    for limit in (None, 0, 5, 100_000):
        answer = await post(client, "/v2/rerank", query="hello", documents=[document], max_tokens_per_doc=limit)
        assert answer["results"] == [{"index": 0, "relevance_score": 3.0}]
    whole = await post(client, "/v2/rerank", query="hello", documents=["w1 hello"], max_tokens_per_doc=2)
    assert whole["results"] == [{"index": 0, "relevance_score": 4.0}]
    cut = await post(client, "/v2/rerank", query="hello", documents=["w1 hello"], max_tokens_per_doc=1)
    assert cut["results"] == [{"index": 0, "relevance_score": 3.0}]


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


# -- tokens -----------------------------------------------------------------------------------------------


async def test_texts_become_tokens_and_tokens_texts(client):
    tokens = await post(client, "/v1/tokenize", text="hello world", model=None)
    ids = [VOCABULARY["hello"], VOCABULARY["world"]]
    meta = {"api_version": VERSION_1, "billed_units": {}}
    assert tokens == {"tokens": ids, "token_strings": ["hello", "world"], "meta": meta}
    assert await post(client, "/v1/detokenize", tokens=ids, model=None) == {"text": "hello world", "meta": meta}
    assert (await post(client, "/v1/tokenize", text=""))["tokens"] == []
    assert (await post(client, "/v1/detokenize", tokens=[]))["text"] == ""


# -- what is wrong ----------------------------------------------------------------------------------------

"""cohere-python, of both versions of the API."""

from base64 import b64decode
from collections.abc import Iterator

import cohere
import numpy as np
import pytest

from tests.end_to_end.comparison import assert_same_directions, assert_same_numbers, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)


@pytest.fixture
def v2(server_url) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(api_key=API_KEY, base_url=server_url) as client:
        yield client


@pytest.fixture
def v1(server_url) -> Iterator[cohere.Client]:
    with cohere.Client(api_key=API_KEY, base_url=server_url) as client:
        yield client


def test_version_2_embeds_in_every_type(v2, vectors, record_client):
    record_client("Cohere", "POST /v2/embed", "cohere ClientV2")
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = v2.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=types)
    embeddings = answer.embeddings
    assert_same_directions(embeddings.float_, vectors)
    assert_same_directions([np.frombuffer(b64decode(text), np.float32) for text in embeddings.base64], vectors)
    for dtype in ("int8", "uint8", "binary", "ubinary"):
        assert_same_numbers(getattr(embeddings, dtype), vectors, dtype)
    assert answer.meta.billed_units.input_tokens > len(TEXTS)


@pytest.mark.parametrize("top", [None, 2])
def test_version_2_reranks(v2, scores, record_client, top):
    record_client("Cohere", "POST /v2/rerank", "cohere ClientV2")
    answer = v2.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=top)
    assert_same_ranking([(result.index, result.relevance_score) for result in answer.results], scores, top)


async def test_version_2_s_asynchronous_client_runs_on_trio(server_url, vectors, record_client):
    record_client("Cohere", "POST /v2/embed", "cohere AsyncClientV2")
    async with cohere.AsyncClientV2(api_key=API_KEY, base_url=server_url) as client:
        answer = await client.v2.embed(
            model="minilm", texts=TEXTS, input_type="search_document", embedding_types=["float"]
        )
    assert_same_directions(answer.embeddings.float_, vectors)


def test_version_2_raises_its_own_errors(v2, server_url):
    with pytest.raises(cohere.NotFoundError, match="`another` does not exist"):
        v2.embed(model="another", texts=TEXTS, input_type="search_document")
    with pytest.raises(cohere.NotFoundError, match="`another` does not exist"):
        v2.rerank(model="another", query=QUERY, documents=TEXTS)
    with pytest.raises(cohere.BadRequestError, match="maximum context length is 256 tokens"):
        v2.embed(model="minilm", texts=[TOO_LONG], input_type="search_document", truncate="NONE")
    with pytest.raises(cohere.BadRequestError, match="reranker"):
        v2.embed(model="reranker", texts=TEXTS, input_type="search_document")
    stranger = cohere.ClientV2(api_key="wrong", base_url=server_url)
    with stranger, pytest.raises(cohere.UnauthorizedError):
        stranger.rerank(model="reranker", query=QUERY, documents=TEXTS)


def test_version_2_embeds_and_reranks_at_invocations(server_url, invocations, vectors, scores, record_client):
    record_client("Cohere", "POST /invocations", "cohere ClientV2")
    client = cohere.ClientV2(api_key=API_KEY, base_url=server_url, httpx_client=invocations)
    answer = client.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert_same_directions(answer.embeddings.float_, vectors)
    ranking = client.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=2)
    assert_same_ranking([(result.index, result.relevance_score) for result in ranking.results], scores, 2)


def test_version_1_embeds(v1, vectors, record_client):
    record_client("Cohere", "POST /v1/embed", "cohere Client")
    assert_same_directions(v1.embed(model="minilm", texts=TEXTS, input_type="search_query").embeddings, vectors)
    by_type = v1.embed(model="minilm", texts=TEXTS, input_type="search_query", embedding_types=["float", "ubinary"])
    assert_same_directions(by_type.embeddings.float_, vectors)
    assert_same_numbers(by_type.embeddings.ubinary, vectors, "ubinary")


@pytest.mark.parametrize("documents", [TEXTS, [{"text": text} for text in TEXTS]], ids=["texts", "objects"])
def test_version_1_reranks(v1, scores, record_client, documents):
    record_client("Cohere", "POST /v1/rerank", "cohere Client")
    answer = v1.rerank(model="reranker", query=QUERY, documents=documents, top_n=3, return_documents=True)
    assert_same_ranking([(result.index, result.relevance_score) for result in answer.results], scores, 3)
    assert [result.document.text for result in answer.results] == [TEXTS[result.index] for result in answer.results]


def test_version_1_classifies(v1, classes, record_client):
    record_client("Cohere", "POST /v1/classify", "cohere Client")
    answer = v1.classify(model="classifier", inputs=TEXTS)
    for text, found, expected in zip(TEXTS, answer.classifications, classes, strict=True):
        assert found.input == text
        assert found.prediction == expected[0]["label"]
        confidences = {name: value.confidence for name, value in found.labels.items()}
        assert confidences == pytest.approx({row["label"]: row["score"] for row in expected}, abs=1e-5)


def test_version_1_tokenizes(v1, record_client):
    record_client("Cohere", "POST /v1/tokenize", "cohere Client")
    record_client("Cohere", "POST /v1/detokenize", "cohere Client")
    taken_apart = v1.tokenize(text="hello world", model="minilm", offline=False)
    assert taken_apart.token_strings == ["hello", "world"]
    assert v1.detokenize(tokens=taken_apart.tokens, model="minilm", offline=False).text == "hello world"


def test_version_1_sees_the_models(v1, record_client):
    record_client("Cohere", "GET /v1/models", "cohere Client")
    record_client("Cohere", "GET /v1/models/{id}", "cohere Client")
    names = [model.name for model in v1.models.list().models]
    assert names == ["minilm", "reranker", "classifier", "splade", "colbert"]
    assert v1.models.get("splade").name == "splade"

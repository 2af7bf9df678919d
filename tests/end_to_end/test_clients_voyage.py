"""voyageai-python."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import requests
import voyageai
import voyageai.error

from tests.end_to_end.comparison import assert_same_directions, assert_same_numbers, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)


@pytest.fixture(scope="module")
def base_url(server_url: str) -> Iterator[str]:
    with requests.Session() as session:  # otherwise one is made that is never closed
        voyageai.requestssession = session
        yield f"{server_url}/v1"
        voyageai.requestssession = None


@pytest.fixture
def client(base_url: str) -> voyageai.Client:
    return voyageai.Client(api_key=API_KEY, base_url=base_url, max_retries=1)


@pytest.mark.parametrize("purpose", [None, "query", "document"])
def test_texts_are_embedded(client, vectors, record_client, purpose):
    record_client("Voyage", "POST /v1/embeddings", "voyageai")
    answer = client.embed(TEXTS, model="minilm", input_type=purpose)
    assert_same_directions(answer.embeddings, vectors)
    assert answer.total_tokens > len(TEXTS)


@pytest.mark.parametrize("dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_every_type_is_read(client, vectors, record_client, dtype):
    record_client("Voyage", "POST /v1/embeddings", "voyageai")
    short = vectors[:, :128] / np.linalg.norm(vectors[:, :128], axis=1, keepdims=True)
    found = client.embed(TEXTS, model="minilm", output_dtype=dtype, output_dimension=128).embeddings
    if dtype == "float":
        assert_same_directions(found, short)
    else:
        assert_same_numbers(found, short, dtype)


@pytest.mark.parametrize("top", [None, 2])
def test_documents_are_reranked(client, scores, record_client, top):
    record_client("Voyage", "POST /v1/rerank", "voyageai")
    answer = client.rerank(QUERY, TEXTS, model="reranker", top_k=top)
    assert_same_ranking([(result.index, result.relevance_score) for result in answer.results], scores, top)
    assert [result.document for result in answer.results] == [TEXTS[result.index] for result in answer.results]
    assert answer.total_tokens > len(TEXTS)


def test_the_asynchronous_client_embeds_and_reranks(base_url, vectors, scores, record_client):
    async def ask() -> tuple[list, list]:
        client = voyageai.AsyncClient(api_key=API_KEY, base_url=base_url, max_retries=1)
        embedded = await client.embed(TEXTS, model="minilm", input_type="document")
        reranked = await client.rerank(QUERY, TEXTS, model="reranker")
        return embedded.embeddings, [(result.index, result.relevance_score) for result in reranked.results]

    record_client("Voyage", "POST /v1/embeddings", "voyageai (async)")
    record_client("Voyage", "POST /v1/rerank", "voyageai (async)")
    embeddings, ranking = asyncio.run(ask())
    assert_same_directions(embeddings, vectors)
    assert_same_ranking(ranking, scores)


def test_what_is_wrong_is_raised_as_its_own_errors(client, base_url):
    with pytest.raises(voyageai.error.APIError, match="`another` does not exist"):
        client.embed(TEXTS, model="another")
    with pytest.raises(voyageai.error.APIError, match="`another` does not exist"):
        client.rerank(QUERY, TEXTS, model="another")
    with pytest.raises(voyageai.error.InvalidRequestError, match="maximum context length is 256 tokens"):
        client.embed([TOO_LONG], model="minilm", truncation=False)
    stranger = voyageai.Client(api_key="wrong", base_url=base_url, max_retries=1)
    for ask in (
        lambda: stranger.embed(TEXTS, model="minilm"),
        lambda: stranger.rerank(QUERY, TEXTS, model="reranker"),
    ):
        with pytest.raises(voyageai.error.AuthenticationError, match="Invalid API key"):
            ask()

"""huggingface_hub's InferenceClient, and Haystack's components for text-embeddings-inference."""

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
    HuggingFaceTEISparseDocumentEmbedder,
    HuggingFaceTEISparseTextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from huggingface_hub import AsyncInferenceClient, InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError

from tests.end_to_end.comparison import assert_same_directions, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)
DOCUMENTS = [Document(content=text) for text in TEXTS]
TOKEN, WRONG_TOKEN = Secret.from_token(API_KEY), Secret.from_token("wrong")


@pytest.fixture(scope="module", autouse=True)
def closed_session() -> Iterator[None]:
    """huggingface_hub keeps one for all its clients."""
    yield
    close_session()


def test_hugging_face_embeds(server_url, vectors, record_client):
    record_client("TEI", "POST /", "huggingface_hub feature_extraction")
    client = InferenceClient(model=server_url, token=API_KEY)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert_same_directions(client.feature_extraction(text), [vector])
    unscaled = client.feature_extraction(TOO_LONG, normalize=False, truncate=True)
    assert np.linalg.norm(unscaled) != pytest.approx(1, abs=1e-3)


def test_hugging_face_s_asynchronous_client_embeds(server_url, vectors, record_client):
    async def embed() -> object:
        async with AsyncInferenceClient(model=server_url, token=API_KEY) as client:
            return await client.feature_extraction(TEXTS[0])

    record_client("TEI", "POST /", "huggingface_hub feature_extraction (async)")
    assert_same_directions(asyncio.run(embed()), vectors[:1])


def test_hugging_face_compares_sentences(server_url, vectors, record_client):
    record_client("TEI", "POST /", "huggingface_hub sentence_similarity")
    client = InferenceClient(model=server_url, token=API_KEY)
    found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_hugging_face_classifies(classifier_url, classes, record_client):
    record_client("TEI", "POST /", "huggingface_hub text_classification")
    client = InferenceClient(model=classifier_url, token=API_KEY)
    for text, expected in zip(TEXTS, classes, strict=True):
        found = client.text_classification(text)
        assert [row.label for row in found] == [row["label"] for row in expected]
        assert [row.score for row in found] == pytest.approx([row["score"] for row in expected], abs=1e-5)


def test_hugging_face_raises_its_own_errors(server_url, classifier_url):
    client = InferenceClient(model=server_url, token=API_KEY)
    with pytest.raises(HfHubHTTPError, match="maximum context length is 256 tokens") as too_long:
        client.feature_extraction(TOO_LONG, truncate=False)
    assert too_long.value.response.status_code == 422
    with pytest.raises(HfHubHTTPError) as stranger:
        InferenceClient(model=classifier_url, token="wrong").text_classification("hello")
    assert stranger.value.response.status_code == 401


# -- Haystack ---------------------------------------------------------------------------------------------


def test_haystack_embeds_a_text_and_documents(server_url, vectors, record_client):
    record_client("TEI", "POST /", "huggingface-api-haystack HuggingFaceAPITextEmbedder")
    record_client("TEI", "POST /", "huggingface-api-haystack HuggingFaceAPIDocumentEmbedder")
    given = ("text_embeddings_inference", {"url": server_url}, TOKEN)
    of_texts, of_documents = (
        HuggingFaceAPITextEmbedder(*given),
        HuggingFaceAPIDocumentEmbedder(*given, progress_bar=False),
    )
    assert_same_directions([of_texts.run(TEXTS[0])["embedding"]], vectors[:1])
    documents = of_documents.run(DOCUMENTS)["documents"]
    assert_same_directions([document.embedding for document in documents], vectors)
    of_texts.close()
    of_documents.close()


def dense(sparse, width: int) -> np.ndarray:
    row = np.zeros(width, dtype=np.float32)
    row[sparse.indices] = sparse.values
    return row


def test_haystack_embeds_sparsely(splade_url, sparse_vectors, record_client):
    record_client("TEI", "POST /embed_sparse", "huggingface-api-haystack HuggingFaceTEISparseTextEmbedder")
    record_client("TEI", "POST /embed_sparse", "huggingface-api-haystack HuggingFaceTEISparseDocumentEmbedder")
    width = sparse_vectors.shape[1]
    of_texts = HuggingFaceTEISparseTextEmbedder(api_base_url=splade_url, token=TOKEN)
    found = [dense(of_texts.run(text)["sparse_embedding"], width) for text in TEXTS]
    np.testing.assert_allclose(found, sparse_vectors, atol=1e-5)
    of_texts.close()

    of_documents = HuggingFaceTEISparseDocumentEmbedder(api_base_url=splade_url, token=TOKEN, progress_bar=False)
    documents = of_documents.run(DOCUMENTS)["documents"]
    found = [dense(document.sparse_embedding, width) for document in documents]
    np.testing.assert_allclose(found, sparse_vectors, atol=1e-5)
    of_documents.close()


@pytest.mark.parametrize("raw", [False, True], ids=["scores", "raw scores"])
def test_haystack_reranks(reranker_url, scores, record_client, raw):
    record_client("TEI", "POST /rerank", "huggingface-api-haystack HuggingFaceTEIRanker")
    ranker = HuggingFaceTEIRanker(url=reranker_url, token=TOKEN, top_k=3, raw_scores=raw)
    found = [(TEXTS.index(row.content), row.score) for row in ranker.run(QUERY, DOCUMENTS)["documents"]]
    assert_same_ranking(found, np.log(scores / (1 - scores)) if raw else scores, 3)


def test_haystack_raises_its_own_errors(server_url, splade_url, reranker_url):
    uncut = HuggingFaceAPITextEmbedder("text_embeddings_inference", {"url": server_url}, TOKEN, truncate=False)
    with pytest.raises(HfHubHTTPError, match="maximum context length is 256 tokens"):
        uncut.run(TOO_LONG)
    uncut.close()
    with pytest.raises(RuntimeError, match="key is missing or wrong"):
        HuggingFaceTEIRanker(url=reranker_url, token=WRONG_TOKEN, max_retries=1).run(QUERY, DOCUMENTS)
    stranger = HuggingFaceTEISparseTextEmbedder(api_base_url=splade_url, token=WRONG_TOKEN)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        stranger.run("hello")
    stranger.close()

"""Clients of text-embeddings-inference: huggingface_hub's, Haystack's components for it, and LlamaIndex's."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.special
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
    HuggingFaceTEISparseDocumentEmbedder,
    HuggingFaceTEISparseTextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from haystack_integrations.components.rankers.huggingface_api.ranker import TruncationDirection
from huggingface_hub import AsyncInferenceClient, InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

from tests.compatibility.tei_servers import LONG, PROMPT, Servers, near
from tests.end_to_end.conftest import LABELS
from tests.end_to_end.texts import API_KEY

TEXTS = ["a nursery owns its tasks", "bread needs flour", "hello"]
QUERY = "who owns a task"
TOKEN = Secret.from_token(API_KEY)


@pytest.fixture(scope="module", autouse=True)
def closed_session() -> Iterator[None]:
    """huggingface_hub keeps one for all its clients."""
    yield
    close_session()


def hub(servers: Servers, kind: str) -> InferenceClient:
    return InferenceClient(model=servers.urls[kind], token=API_KEY)


@pytest.mark.parametrize("path", ["", "/embed", "/invocations"])
def test_feature_extraction_has_all_its_options(servers, record_client, path):
    record_client("TEI", f"POST {path or '/'}", "huggingface_hub feature_extraction")
    client = InferenceClient(model=servers.urls["embedding"] + path, token=API_KEY)
    oracle = servers.oracle("embedding")
    near(client.feature_extraction("bread"), [oracle.vector("bread")])
    near(client.feature_extraction(TEXTS), [oracle.vector(text) for text in TEXTS])
    near(client.feature_extraction("bread", normalize=False), [oracle.vector("bread", normalize=False)])
    near(client.feature_extraction("bread", prompt_name="query"), [oracle.vector(f"{PROMPT}bread")])
    near(client.feature_extraction("bread", dimensions=8), [oracle.vector("bread", dimensions=8)])
    for side in ("left", "right"):
        found = client.feature_extraction(LONG, truncate=True, truncation_direction=side)
        near(found, [oracle.vector(LONG, side=side.capitalize())])


def test_feature_extraction_is_that_of_the_model(servers, record_client):
    record_client("TEI", "POST /", "huggingface_hub feature_extraction")
    (tokens,) = hub(servers, "colbert").feature_extraction("bread")
    near(np.linalg.norm(tokens, axis=1), np.ones(len(tokens)))
    every = InferenceClient(model=servers.urls["embedding"] + "/embed_all", token=API_KEY)
    near(every.feature_extraction("bread"), [servers.oracle("embedding").tokens("bread")])


def test_the_hub_s_asynchronous_client_embeds(servers, record_client):
    async def embed() -> object:
        async with AsyncInferenceClient(model=servers.urls["embedding"], token=API_KEY) as client:
            return await client.feature_extraction("bread")

    record_client("TEI", "POST /", "huggingface_hub feature_extraction (async)")
    near(asyncio.run(embed()), [servers.oracle("embedding").vector("bread")])


def test_the_hub_s_client_compares_sentences(servers, record_client):
    record_client("TEI", "POST /", "huggingface_hub sentence_similarity")
    first, *others = [servers.oracle("embedding").vector(text) for text in TEXTS]
    found = hub(servers, "embedding").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    near(found, [first @ other for other in others])


@pytest.mark.parametrize("path", ["", "/invocations"])
def test_the_hub_s_client_classifies(servers, record_client, path):
    record_client("TEI", f"POST {path or '/'}", "huggingface_hub text_classification")
    found = InferenceClient(model=servers.urls["classifier"] + path, token=API_KEY).text_classification(TEXTS[0])
    probabilities = scipy.special.softmax(servers.oracle("classifier").tokens(TEXTS[0]))
    best_first = np.argsort(-probabilities)
    assert [row.label for row in found] == [LABELS[label] for label in best_first]
    near([row.score for row in found], probabilities[best_first])


def test_errors_are_told_by_the_clients(servers):
    with pytest.raises(HfHubHTTPError, match="maximum context length") as too_long:
        hub(servers, "embedding").feature_extraction(LONG, truncate=False)
    assert too_long.value.response.status_code == 422
    stranger = HuggingFaceTEIRanker(url=servers.urls["reranker"], token=Secret.from_token("wrong"), max_retries=1)
    with pytest.raises(RuntimeError, match="Invalid API key"):
        stranger.run(QUERY, [Document(content="hello")])


def test_the_hub_s_client_reads_health_and_info(servers, record_client):
    record_client("TEI", "GET /info", "huggingface_hub get_endpoint_info")
    record_client("TEI", "GET /health", "huggingface_hub health_check")
    client = InferenceClient(model=servers.urls["embedding"], token=API_KEY, provider="hf-inference")
    assert client.health_check()
    assert client.get_endpoint_info()["model_type"] == {"embedding": {"pooling": "mean"}}


# -- Haystack --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_haystack_scales_and_decorates_texts(servers, record_client, normalize):
    record_client("TEI", "POST /", "huggingface-api-haystack HuggingFaceAPITextEmbedder")
    options = {"prefix": "a ", "suffix": " b", "normalize": normalize, "truncate": True}
    embedder = HuggingFaceAPITextEmbedder(
        "text_embeddings_inference", {"url": servers.urls["embedding"]}, TOKEN, **options
    )
    expected = servers.oracle("embedding").vector("a bread b", normalize=normalize)
    near(embedder.run("bread")["embedding"], expected)
    embedder.close()


def test_haystack_embeds_documents(servers, record_client):
    record_client("TEI", "POST /", "huggingface-api-haystack HuggingFaceAPIDocumentEmbedder")
    given = ("text_embeddings_inference", {"url": servers.urls["embedding"]}, TOKEN)
    embedder = HuggingFaceAPIDocumentEmbedder(*given, progress_bar=False)
    documents = embedder.run([Document(content=text) for text in TEXTS])["documents"]
    vector = servers.oracle("embedding").vector
    near([document.embedding for document in documents], [vector(text, normalize=False) for text in TEXTS])
    embedder.close()


def test_haystack_embeds_sparsely_what_is_too_long(servers, record_client):
    record_client("TEI", "POST /embed_sparse", "huggingface-api-haystack HuggingFaceTEISparseTextEmbedder")
    record_client("TEI", "POST /embed_sparse", "huggingface-api-haystack HuggingFaceTEISparseDocumentEmbedder")
    given = {"api_base_url": servers.urls["splade"], "token": TOKEN}
    of_texts = HuggingFaceTEISparseTextEmbedder(**given)
    of_documents = HuggingFaceTEISparseDocumentEmbedder(**given, progress_bar=False)
    (document,) = of_documents.run([Document(content=LONG)])["documents"]
    expected = servers.oracle("splade").weights(LONG)
    for sparse in (of_texts.run(LONG)["sparse_embedding"], document.sparse_embedding):
        found = np.zeros_like(expected)
        found[sparse.indices] = sparse.values
        near(found, expected)
    of_texts.close()
    of_documents.close()


@pytest.mark.parametrize(("side", "raw"), [("Left", True), ("Right", False)])
def test_haystack_says_where_documents_are_truncated(servers, record_client, side, raw):
    record_client("TEI", "POST /rerank", "huggingface-api-haystack HuggingFaceTEIRanker")
    ranker = HuggingFaceTEIRanker(url=servers.urls["reranker"], token=TOKEN, raw_scores=raw)
    documents = [Document(content=text) for text in (LONG, *TEXTS)]
    ranked = ranker.run(QUERY, documents, truncation_direction=TruncationDirection[side.upper()])["documents"]
    logits = [servers.oracle("reranker").tokens(QUERY, row.content, side=side)[0] for row in ranked]
    near([row.score for row in ranked], logits if raw else scipy.special.expit(logits))
    assert len(ranked) == len(documents)


# -- LlamaIndex ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["/embed", "/"])
async def test_llama_index_embeds_with_its_options_and_on_trio(servers, record_client, endpoint):
    record_client("TEI", f"POST {endpoint}", "llama-index TextEmbeddingsInference")
    record_client("TEI", f"POST {endpoint}", "llama-index TextEmbeddingsInference (async)")
    embedder = TextEmbeddingsInference(
        model_name="embedding",
        base_url=servers.urls["embedding"],
        endpoint=endpoint,
        text_instruction="text:",
        query_instruction="query:",
        embed_batch_size=2,
        auth_token=API_KEY,
    )
    vector = servers.oracle("embedding").vector
    near(embedder.get_text_embedding_batch([*TEXTS, LONG]), [vector(f"text: {text}") for text in (*TEXTS, LONG)])
    near(embedder.get_query_embedding("bread"), vector(f"{PROMPT}bread"))
    near(await embedder.aget_text_embedding("bread"), vector("text: bread"))
    near(await embedder.aget_query_embedding("bread"), vector(f"{PROMPT}bread"))


@pytest.mark.parametrize("key", [API_KEY, f"Bearer {API_KEY}"])
def test_llama_index_reranks_and_keeps_what_it_had(servers, record_client, key):
    record_client("TEI", "POST /rerank", "llama-index TextEmbeddingInference (reranker)")
    reranker = TextEmbeddingInference(base_url=servers.urls["reranker"], top_n=2, auth_token=key)
    reranker.keep_retrieval_score = True
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]
    ranked = reranker.postprocess_nodes(nodes, query_str=QUERY)
    oracle = servers.oracle("reranker")
    expected = {text: scipy.special.expit(oracle.tokens(QUERY, text)[0]) for text in TEXTS}
    assert [row.text for row in ranked] == sorted(TEXTS, key=expected.__getitem__, reverse=True)[:2]
    near([row.score for row in ranked], [expected[row.text] for row in ranked])
    assert {row.node.metadata["retrieval_score"] for row in ranked} == {0.5}

"""LlamaIndex's embedder and reranker for text-embeddings-inference."""

import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

from tests.end_to_end.comparison import assert_same_directions, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)
EMBED = ("TEI", "POST /embed", "llama-index TextEmbeddingsInference")


@pytest.fixture
def embedder(server_url) -> TextEmbeddingsInference:
    return TextEmbeddingsInference(model_name="minilm", base_url=server_url, auth_token=API_KEY)


def test_texts_and_queries_are_embedded(embedder, vectors, record_client):
    record_client(*EMBED)
    assert_same_directions(embedder.get_text_embedding_batch(TEXTS), vectors)
    assert_same_directions([embedder.get_text_embedding(text) for text in TEXTS], vectors)
    assert_same_directions([embedder.get_query_embedding(text) for text in TEXTS], vectors)
    assert len(embedder.get_text_embedding(TOO_LONG)) == vectors.shape[1]


async def test_they_are_embedded_on_trio(embedder, vectors, record_client):
    record_client(EMBED[0], EMBED[1], f"{EMBED[2]} (async)")
    assert_same_directions([await embedder.aget_text_embedding(text) for text in TEXTS], vectors)
    assert_same_directions([await embedder.aget_query_embedding(text) for text in TEXTS], vectors)


def test_an_instruction_is_put_before_a_query(server_url, embedder, record_client):
    record_client(*EMBED)
    instructed = TextEmbeddingsInference(
        model_name="minilm", base_url=server_url, auth_token=API_KEY, query_instruction="query:"
    )
    expected = embedder.get_text_embedding(f"query: {QUERY}")
    assert_same_directions([instructed.get_query_embedding(QUERY)], [expected])


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]


def test_nodes_are_reranked_with_a_key_without_bearer(reranker_url, scores, record_client):
    record_client("TEI", "POST /rerank", "llama-index TextEmbeddingInference (reranker)")
    reranker = TextEmbeddingInference(base_url=reranker_url, top_n=3, auth_token=API_KEY)
    ranked = reranker.postprocess_nodes(nodes(), query_str=QUERY)
    assert_same_ranking([(TEXTS.index(row.text), row.score) for row in ranked], scores, 3)

"""The packages of LangChain and LlamaIndex for NVIDIA NIM, and Milvus' functions for models behind a URL.

They are imported by the tests: each takes a second, and every process of a run would import them to find the tests.
"""

import numpy as np
import pytest

from tests.end_to_end.comparison import LARGEST_SCORE_DIFFERENCE, assert_same_directions
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)


pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collected")]
"""The packages warn of their own past, and leave their clients open."""


def test_langchain_embeds_and_is_told_of_texts_that_are_too_long(server_url, vectors, record_client):
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    record_client("NIM", "POST /v1/embeddings", "langchain-nvidia-ai-endpoints")
    embedder = NVIDIAEmbeddings(model="minilm", base_url=server_url, api_key=API_KEY)
    assert_same_directions(embedder.embed_documents(TEXTS), vectors)
    assert_same_directions([embedder.embed_query(TEXTS[0])], vectors[:1])
    with pytest.raises(Exception, match="maximum context length is 256 tokens"):
        embedder.embed_query(TOO_LONG)
    for truncate in ("START", "END"):
        cutting = NVIDIAEmbeddings(model="minilm", base_url=server_url, api_key=API_KEY, truncate=truncate)
        assert len(cutting.embed_query(TOO_LONG)) == 384
    with pytest.raises(Exception, match="another"):
        NVIDIAEmbeddings(model="another", base_url=server_url, api_key=API_KEY).embed_query("hello")


def test_langchain_without_a_name_takes_the_first_model(server_url):
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    embedder = NVIDIAEmbeddings(base_url=server_url, api_key=API_KEY)
    assert embedder.model == "minilm"


def test_langchain_reranks_by_logits(server_url, folders, record_client):
    import torch
    from langchain_core.documents import Document
    from langchain_nvidia_ai_endpoints import NVIDIARerank

    from tests.models.classifier_families import cross_encoder

    record_client("NIM", "POST /v1/ranking", "langchain-nvidia-ai-endpoints")
    reranker = NVIDIARerank(model="reranker", base_url=server_url, api_key=API_KEY, top_n=3)
    ranked = reranker.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    pairs = [(QUERY, text) for text in TEXTS]
    logits = cross_encoder(folders["reranker"]).predict(pairs, activation_fn=torch.nn.Identity())
    best = np.argsort(-logits, kind="stable")[:3]
    assert [document.page_content for document in ranked] == [TEXTS[index] for index in best]
    found = np.array([document.metadata["relevance_score"] for document in ranked])
    assert np.abs(found - logits[best]).max() <= LARGEST_SCORE_DIFFERENCE


@pytest.mark.slow
def test_llama_index_embeds_and_chooses_the_first_model(server_url, vectors, record_client):
    from llama_index.embeddings.nvidia import NVIDIAEmbedding

    record_client("NIM", "POST /v1/embeddings", "llama-index-embeddings-nvidia")
    embedder = NVIDIAEmbedding(base_url=f"{server_url}/v1", api_key=API_KEY)
    assert embedder.model == "minilm"
    assert_same_directions(embedder.get_text_embedding_batch(TEXTS), vectors)
    assert_same_directions([embedder.get_query_embedding(TEXTS[0])], vectors[:1])


@pytest.mark.slow
def test_milvus_functions_for_models_behind_a_url_embed(server_url, vectors, record_client):
    from pymilvus.model.dense import OpenAIEmbeddingFunction

    record_client("OpenAI", "POST /v1/embeddings", "pymilvus-model")
    embedder = OpenAIEmbeddingFunction("minilm", api_key=API_KEY, base_url=f"{server_url}/v1")
    assert_same_directions(embedder.encode_documents(TEXTS), vectors)

"""ollama-python, and what LangChain and LlamaIndex make of it.

They are imported by the tests: each takes a second, and every process of a run would import them to find the tests.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.comparison import assert_same_directions
from tests.end_to_end.texts import A_FEW, API_KEY, TOO_LONG

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]
"""LangChain and LlamaIndex leave their clients open."""

TEXTS = list(A_FEW)
KEY = {"Authorization": f"Bearer {API_KEY}"}


@pytest.fixture
def client(server_url: str) -> Iterator[Any]:
    import ollama

    with ollama.Client(server_url, headers=KEY) as client:
        yield client


def test_texts_are_embedded_as_unit_vectors_and_counted(client, vectors, record_client):
    record_client("Ollama", "POST /api/embed", "ollama")
    answer = client.embed("minilm", TEXTS, keep_alive="5m", options={"num_ctx": 2048})
    assert_same_directions(answer.embeddings, vectors)
    assert np.linalg.norm(answer.embeddings, axis=1) == pytest.approx(1, abs=1e-5)
    assert answer.model == "minilm"
    assert answer.prompt_eval_count > len(TEXTS)
    assert answer.total_duration > 0
    assert np.shape(client.embed("minilm:latest", TEXTS[0], dimensions=64).embeddings) == (1, 64)


def test_the_older_method_embeds_one_text(client, vectors, record_client):
    record_client("Ollama", "POST /api/embeddings", "ollama")
    vector = client.embeddings("minilm", TEXTS[0]).embedding
    assert_same_directions([vector], vectors[:1])
    assert np.linalg.norm(vector) > 1.1, "it is as the model pools it"


def test_models_are_listed_and_shown(client, record_client):
    for route in ("GET /api/tags", "GET /api/ps", "POST /api/show"):
        record_client("Ollama", route, "ollama")
    listed = {model.model: model for model in client.list().models}
    assert {"minilm:latest", "reranker:latest"} <= set(listed)
    assert listed["minilm:latest"].details.family == "bert"
    assert {model.model for model in client.ps().models} == set(listed)
    shown = client.show("minilm")
    assert shown.capabilities == ["embedding"]
    assert (shown.modelinfo["bert.context_length"], shown.modelinfo["bert.embedding_length"]) == (256, 384)


def test_errors_are_its_own(client, server_url):
    import ollama

    for call, status, message in (
        (lambda: client.embed("another", "hello"), 404, "model 'another' not found"),
        (lambda: client.show("another"), 404, "model 'another' not found"),
        (lambda: client.embed("minilm", TOO_LONG, truncate=False), 400, "the input length exceeds the context length"),
        (lambda: client.chat("minilm", [{"role": "user", "content": "hello"}]), 400, "does not generate text"),
        (lambda: client.generate("minilm", "hello"), 400, "This server does not generate text."),
        (lambda: client.pull("llama3"), 400, "This server downloads no models."),
    ):
        with pytest.raises(ollama.ResponseError, match=message) as caught:
            call()
        assert caught.value.status_code == status
    no_key = pytest.raises(ollama.ResponseError, match=r"Send Authorization: Bearer KEY\.")
    with ollama.Client(server_url) as keyless, no_key as caught:
        keyless.embed("minilm", "hello")
    assert caught.value.status_code == 401


def test_a_served_model_is_pulled(client):
    assert client.pull("minilm").status == "success"
    assert [part.status for part in client.pull("minilm", stream=True)] == ["success"]


@pytest.mark.slow
def test_langchain_embeds_and_finds_the_model(server_url, vectors, record_client):
    from langchain_ollama import OllamaEmbeddings

    record_client("Ollama", "POST /api/embed", "langchain-ollama")
    given = {"base_url": server_url, "client_kwargs": {"headers": KEY}, "validate_model_on_init": True}
    embedder = OllamaEmbeddings(model="minilm", **given)
    assert_same_directions(embedder.embed_documents(TEXTS), vectors)
    assert_same_directions([embedder.embed_query(TEXTS[0])], vectors[:1])
    with pytest.raises(ValueError, match="another"):
        OllamaEmbeddings(model="another", **given)


@pytest.mark.slow
def test_llama_index_embeds(server_url, vectors, record_client):
    from llama_index.embeddings.ollama import OllamaEmbedding

    record_client("Ollama", "POST /api/embed", "llama-index-embeddings-ollama")
    embedder = OllamaEmbedding("minilm", base_url=server_url, client_kwargs={"headers": KEY})
    assert_same_directions(embedder.get_text_embedding_batch(TEXTS), vectors)
    assert_same_directions([embedder.get_query_embedding(TEXTS[0])], vectors[:1])

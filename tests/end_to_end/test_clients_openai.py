"""openai-python, and what is built on it: LangChain's and Haystack's embedders."""

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from langchain_openai import OpenAIEmbeddings

from tests.end_to_end.comparison import assert_same_directions
from tests.end_to_end.texts import A_FEW, API_KEY, TOO_LONG

EMBEDDINGS = ("OpenAI", "POST /v1/embeddings")


@pytest.fixture
def client(server_url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as one:
        yield one


@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float", "base64"], ids=["not given", "float", "base64"])
def test_openai_embeds_in_every_encoding(client, vectors, record_client, encoding):
    record_client(*EMBEDDINGS, "openai")
    answer = client.embeddings.create(model="minilm", input=list(A_FEW), encoding_format=encoding)
    found = [
        np.frombuffer(b64decode(item.embedding), np.float32) if isinstance(item.embedding, str) else item.embedding
        for item in answer.data
    ]
    assert_same_directions(found, vectors)
    assert answer.model == "minilm"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(A_FEW)


async def test_openai_s_asynchronous_client_runs_on_trio(server_url, vectors, record_client):
    record_client(*EMBEDDINGS, "openai (async)")
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as client:
        answer = await client.embeddings.create(model="minilm", input=list(A_FEW))
        assert_same_directions([item.embedding for item in answer.data], vectors)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="another", input="hello")


def test_openai_sees_the_models(client, record_client):
    record_client("OpenAI", "GET /v1/models", "openai")
    record_client("OpenAI", "GET /v1/models/{id}", "openai")
    names = ["minilm", "reranker", "classifier", "splade", "colbert"]
    assert [model.id for model in client.models.list()] == names
    for name in names:
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="another"):
        client.models.retrieve("another")


def test_openai_raises_its_own_errors(client, server_url):
    with pytest.raises(openai.NotFoundError, match="`another` does not exist"):
        client.embeddings.create(model="another", input="hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model="minilm", input=TOO_LONG)
    with pytest.raises(openai.BadRequestError, match="reranker"):
        client.embeddings.create(model="reranker", input="hello")
    stranger = openai.OpenAI(base_url=f"{server_url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.embeddings.create(model="minilm", input="hello")


def test_openai_embeds_at_invocations(server_url, invocations, vectors, record_client):
    record_client("OpenAI", "POST /invocations", "openai")
    client = openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0, http_client=invocations)
    answer = client.embeddings.create(model="minilm", input=list(A_FEW))
    assert_same_directions([item.embedding for item in answer.data], vectors)
    with pytest.raises(openai.NotFoundError, match="`another` does not exist"):
        client.embeddings.create(model="another", input="hello")


# -- LangChain --------------------------------------------------------------------------------------------


@pytest.fixture
def langchain(server_url) -> Iterator[dict]:
    """What every embedder is given."""
    with httpx.Client() as http:
        given = {"base_url": f"{server_url}/v1", "api_key": API_KEY, "max_retries": 0}
        yield {**given, "model": "minilm", "http_client": http}


def test_langchain_embeds(langchain, vectors, record_client):
    record_client(*EMBEDDINGS, "langchain-openai (check_embedding_ctx_length=False)")
    embedder = OpenAIEmbeddings(**langchain, check_embedding_ctx_length=False)
    assert_same_directions(embedder.embed_documents(list(A_FEW)), vectors)
    assert_same_directions([embedder.embed_query(A_FEW[0])], vectors[:1])


def test_langchain_embeds_texts_that_the_model_s_own_tokenizer_has_cut(langchain, minilm, vectors, record_client):
    record_client(*EMBEDDINGS, "langchain-openai (tiktoken_enabled=False)")
    embedder = OpenAIEmbeddings(**langchain, tiktoken_enabled=False, tiktoken_model_name=str(minilm))
    assert_same_directions(embedder.embed_documents([A_FEW[1]]), vectors[1:2])


def test_langchain_s_default_is_told_what_to_set(langchain, monkeypatch):
    """It sends ids of OpenAI's vocabulary, which another package here brings along."""
    import llama_index.core

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(llama_index.core.__file__).parent / "_static/tiktoken_cache"))
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        OpenAIEmbeddings(**langchain).embed_documents(list(A_FEW))


# -- Haystack ---------------------------------------------------------------------------------------------


def test_haystack_embeds_a_text_and_documents(server_url, vectors, record_client):
    record_client(*EMBEDDINGS, "haystack-ai OpenAITextEmbedder")
    record_client(*EMBEDDINGS, "haystack-ai OpenAIDocumentEmbedder")
    given = {"api_base_url": f"{server_url}/v1", "api_key": Secret.from_token(API_KEY), "max_retries": 0}
    of_texts = OpenAITextEmbedder(**given, model="minilm")
    assert_same_directions([of_texts.run(A_FEW[0])["embedding"]], vectors[:1])
    of_documents = OpenAIDocumentEmbedder(**given, model="minilm", progress_bar=False)
    documents = of_documents.run([Document(content=text) for text in A_FEW])["documents"]
    assert_same_directions([document.embedding for document in documents], vectors)
    of_texts.close()
    of_documents.close()

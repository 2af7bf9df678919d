"""Clients whose requests are sent to ``/invocations`` instead of their own routes, as behind SageMaker."""

from collections.abc import Iterator

import cohere
import httpx
import openai
import pytest
from haystack.components.embedders import OpenAITextEmbedder
from haystack.utils import Secret
from huggingface_hub import InferenceClient, close_session
from langchain_openai import OpenAIEmbeddings

from tests.end_to_end.comparison import assert_same_directions, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG

TEXTS = list(A_FEW)
ROUTE = "POST /invocations"


def to_invocations(request: httpx.Request) -> None:
    if request.method == "POST":
        request.url = request.url.copy_with(path="/invocations")


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(event_hooks={"request": [to_invocations]}) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def closed_session() -> Iterator[None]:
    """huggingface_hub keeps one for all its clients."""
    yield
    close_session()


def test_openai_embeds(server_url, http, vectors, record_client):
    record_client("OpenAI", ROUTE, "openai")
    client = openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0, http_client=http)
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert_same_directions([item.embedding for item in answer.data], vectors)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model="minilm", input=TOO_LONG)
    with pytest.raises(openai.NotFoundError, match="`another` does not exist"):
        client.embeddings.create(model="another", input="hello")


def test_langchain_embeds(server_url, http, vectors, record_client):
    record_client("OpenAI", ROUTE, "langchain-openai")
    embedder = OpenAIEmbeddings(
        base_url=f"{server_url}/v1",
        api_key=API_KEY,
        model="minilm",
        check_embedding_ctx_length=False,
        http_client=http,
    )
    assert_same_directions(embedder.embed_documents(TEXTS), vectors)


def test_haystack_embeds(server_url, vectors, record_client):
    record_client("OpenAI", ROUTE, "haystack OpenAITextEmbedder")
    embedder = OpenAITextEmbedder(
        api_key=Secret.from_token(API_KEY),
        api_base_url=f"{server_url}/v1",
        model="minilm",
        http_client_kwargs={"event_hooks": {"request": [to_invocations]}},
    )
    assert_same_directions([embedder.run(text)["embedding"] for text in TEXTS], vectors)
    embedder.close()


def test_cohere_embeds_and_reranks(server_url, http, vectors, scores, record_client):
    record_client("Cohere", ROUTE, "cohere ClientV2")
    client = cohere.ClientV2(api_key=API_KEY, base_url=server_url, httpx_client=http)
    answer = client.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert_same_directions(answer.embeddings.float_, vectors)
    ranking = client.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=2)
    assert_same_ranking([(result.index, result.relevance_score) for result in ranking.results], scores, 2)
    with pytest.raises(cohere.NotFoundError, match="`another` does not exist"):
        client.embed(model="another", texts=TEXTS, input_type="search_document")


def test_hugging_face_embeds_and_classifies(server_url, classifier_url, vectors, classes, record_client):
    record_client("TEI", ROUTE, "huggingface_hub feature_extraction")
    client = InferenceClient(model=f"{server_url}/invocations", token=API_KEY)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert_same_directions(client.feature_extraction(text), [vector])
    record_client("TEI", ROUTE, "huggingface_hub text_classification")
    classifier = InferenceClient(model=f"{classifier_url}/invocations", token=API_KEY)
    for text, labels in zip(TEXTS, classes, strict=True):
        found = classifier.text_classification(text, top_k=len(labels))
        assert [label.label for label in found] == [label["label"] for label in labels]

"""The clients for JavaScript, run by Node: a program uses each of them, and the tests look at what came of it."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.end_to_end.comparison import assert_same_directions, assert_same_ranking, cosines
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY
from tests.server.server_process import ROOT

FOLDER = ROOT / "tests" / "end_to_end" / "node"
TEXTS = list(A_FEW)

pytestmark = pytest.mark.skipif(
    not (FOLDER / "node_modules").exists() or shutil.which("node") is None, reason="scripts/test installs the clients"
)

EMBEDDING = {
    "openai embeddings": ("OpenAI", "POST /v1/embeddings", "openai (npm)"),
    "langchain openai": ("OpenAI", "POST /v1/embeddings", "@langchain/openai (npm)"),
    "ollama embed": ("Ollama", "POST /api/embed", "ollama (npm)"),
    "langchain ollama": ("Ollama", "POST /api/embed", "@langchain/ollama (npm)"),
    "cohere embed": ("Cohere", "POST /v2/embed", "cohere-ai (npm)"),
    "voyage embed": ("Voyage", "POST /v1/embeddings", "voyageai (npm)"),
    "hub features": ("TEI", "POST /embed", "@huggingface/inference (npm)"),
}

RERANKING = {
    "cohere rerank": ("Cohere", "POST /v2/rerank", "cohere-ai (npm)"),
    "cohere rerank, version 1": ("Cohere", "POST /v1/rerank", "cohere-ai (npm)"),
    "voyage rerank": ("Voyage", "POST /v1/rerank", "voyageai (npm)"),
}

WRONG = {
    "openai error": ("NotFoundError", "`another` does not exist", 404),
    "ollama error": ("ResponseError", "model 'another' not found", 404),
    "langchain ollama error": ("ResponseError", "model 'another' not found", 404),
    "cohere error": ("NotFoundError", "`another` does not exist", 404),
    "voyage error": ("VoyageAIError", "`another` does not exist", 404),
}


@pytest.fixture(scope="module")
def outcomes(server_url: str) -> dict[str, Any]:
    """What came of each call: the program is started once."""
    given = json.dumps({"texts": TEXTS, "query": QUERY})
    command = ["node", FOLDER / "ask.mjs", server_url, API_KEY]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def value_of(outcomes: dict[str, Any], name: str) -> Any:
    assert "value" in outcomes[name], outcomes[name]
    return outcomes[name]["value"]


@pytest.mark.parametrize("name", EMBEDDING)
def test_texts_are_embedded(outcomes, vectors, record_client, name):
    record_client(*EMBEDDING[name])
    assert_same_directions(value_of(outcomes, name), vectors)


@pytest.mark.parametrize("name", RERANKING)
def test_documents_are_reranked(outcomes, scores, record_client, name):
    record_client(*RERANKING[name])
    assert_same_ranking([(index, score) for index, score in value_of(outcomes, name)], scores)


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_the_clients_own(outcomes, name):
    error, message, status = WRONG[name]
    outcome = outcomes[name]
    assert (outcome["error"], outcome["status"]) == (error, status), outcome
    assert message in outcome["message"]


def test_ollama_s_client_finds_the_models(outcomes, record_client):
    for route in ("POST /api/embeddings", "GET /api/tags", "GET /api/ps", "POST /api/show", "POST /api/pull"):
        record_client("Ollama", route, "ollama (npm)")
    assert {"minilm:latest", "reranker:latest"} <= set(value_of(outcomes, "ollama models"))
    assert set(value_of(outcomes, "ollama running")) == set(value_of(outcomes, "ollama models"))
    assert value_of(outcomes, "ollama show") == 256
    assert value_of(outcomes, "ollama pull") == "success"
    assert len(value_of(outcomes, "ollama embeddings")[0]) == 384


def test_openai_s_client_lists_the_models(outcomes):
    assert value_of(outcomes, "openai models")[:2] == ["minilm", "reranker"]


def test_the_hub_s_client_compares_sentences(outcomes, minilm, vectors, record_client):
    from sentence_transformers import SentenceTransformer

    record_client("TEI", "POST /", "@huggingface/inference (npm)")
    query = SentenceTransformer(str(minilm), device="cpu").encode([QUERY] * len(TEXTS))
    assert value_of(outcomes, "hub similarity") == pytest.approx(cosines(query, vectors).tolist(), abs=1e-5)

"""litellm, in each of the dialects it speaks to a server of one's own.

It needs other versions than the rest of the tests do: a program asks in an environment that ``scripts/test`` makes.
"""

import json
import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import Factory, frozen

from tests.end_to_end.comparison import assert_same_directions, assert_same_ranking
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY, TOO_LONG
from tests.server.server_process import ROOT

PYTHON = ROOT / ".venv-litellm" / "bin" / "python"
PROGRAM = Path(__file__).parent / "programs" / "ask_litellm.py"
TEXTS = list(A_FEW)

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="scripts/test makes litellm's environment")


@frozen
class Way:
    """How one of litellm's providers is told where to ask, and what it asks then."""

    model: str
    base: str
    dialect: str
    route: str
    more: Mapping[str, Any] = Factory(dict)


EMBEDDING = {
    "openai": Way("openai/minilm", "{server}/v1", "OpenAI", "POST /v1/embeddings"),
    "hosted_vllm": Way("hosted_vllm/minilm", "{server}/v1", "OpenAI", "POST /v1/embeddings"),
    "infinity": Way("infinity/minilm", "{server}", "OpenAI", "POST /embeddings"),
    "jina_ai": Way("jina_ai/minilm", "{server}/v1", "OpenAI", "POST /v1/embeddings"),
    "voyage": Way("voyage/minilm", "{server}/v1", "OpenAI", "POST /v1/embeddings"),
    "cohere": Way("cohere/minilm", "{server}/v2/embed", "Cohere", "POST /v2/embed"),
    "nvidia_nim": Way(
        "nvidia_nim/minilm",
        "{server}/v1",
        "NIM",
        "POST /v1/embeddings",
        {"input_type": "passage", "truncate": "END", "encoding_format": "float"},
    ),
    # Without input_type it asks Hugging Face's own site what the model is for.
    "huggingface": Way("huggingface/minilm", "{server}", "TEI", "POST /", {"input_type": "feature-extraction"}),
    "cohere, at /invocations": Way("cohere/minilm", "{server}/invocations", "Cohere", "POST /invocations"),
}

RERANKING = {
    "hosted_vllm": Way("hosted_vllm/reranker", "{server}", "vLLM", "POST /rerank"),
    "jina_ai": Way("jina_ai/reranker", "{server}", "Jina", "POST /v1/rerank"),
    "cohere": Way("cohere/reranker", "{server}", "Cohere", "POST /v2/rerank"),
    "cohere v1": Way("cohere/reranker", "{server}/v1/rerank", "Cohere", "POST /v1/rerank"),
    "huggingface": Way("huggingface/reranker", "{reranker}", "TEI", "POST /rerank"),
    # Infinity's documents are bare strings; those of the others are objects.
    "infinity": Way("infinity/reranker", "{server}", "Jina", "POST /rerank", {"return_documents": False}),
    # Without ``top_n`` it sends no ``top_k``, by which Voyage's requests are told from others, and reads ``data``.
    "voyage": Way("voyage/reranker", "{server}/v1/rerank", "Voyage", "POST /v1/rerank"),
    # The response has logits, which it returns as they are.
    "nvidia_nim": Way("nvidia_nim/reranker", "{server}", "NIM", "POST /v1/retrieval/{name}/reranking"),
    "nvidia_nim, ranking": Way("nvidia_nim/ranking/reranker", "{server}", "NIM", "POST /v1/ranking", {"top_n": 2}),
    "voyage, with top_n": Way("voyage/reranker", "{server}/v1/rerank", "Voyage", "POST /v1/rerank", {"top_n": 2}),
}

WRONG = {
    "unknown model, embedding": ("embedding", {"model": "hosted_vllm/another", "input": TEXTS}, "NotFoundError"),
    "unknown model, cohere": ("rerank", {"model": "cohere/another"}, "NotFoundError"),
    "unknown model, infinity": ("rerank", {"model": "infinity/another"}, "NotFoundError"),
    "too long": ("embedding", {"model": "hosted_vllm/minilm", "input": [TOO_LONG]}, "ContextWindowExceededError"),
    "ollama, without a key": (
        "embedding",
        {"model": "ollama/minilm", "input": TEXTS, "api_base": "{server}"},
        "AuthenticationError",
    ),
    "wrong key": (
        "embedding",
        {"model": "hosted_vllm/minilm", "input": TEXTS, "api_key": "wrong"},
        "AuthenticationError",
    ),
}


@pytest.fixture(scope="module")
def outcomes(server_url: str, reranker_url: str) -> dict[tuple[str, str], Any]:
    """What came of each call, by function and provider: the program is started once."""

    def arguments(way: Way) -> dict[str, Any]:
        base = way.base.format(server=server_url, reranker=reranker_url)
        return {"model": way.model, "api_base": base, "api_key": API_KEY, **way.more}

    calls = {("embedding", name): {"function": "embedding", "arguments": {**arguments(way), "input": TEXTS}}
             for name, way in EMBEDDING.items()}  # fmt: skip
    ranked = {"query": QUERY, "documents": TEXTS}
    calls |= {("rerank", name): {"function": "rerank", "arguments": {**arguments(way), **ranked}}
              for name, way in RERANKING.items()}  # fmt: skip
    for name, (function, given, _) in WRONG.items():
        defaults = {"api_base": server_url, "api_key": API_KEY}
        defaults |= ranked if function == "rerank" else {"api_base": f"{server_url}/v1"}
        given = {name: server_url if value == "{server}" else value for name, value in given.items()}
        calls["wrong", name] = {"function": function, "arguments": defaults | given}

    done = subprocess.run(
        [PYTHON, PROGRAM],
        input=json.dumps(list(calls.values())),
        stdout=subprocess.PIPE,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        text=True,
        check=True,
    )
    return dict(zip(calls, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("provider", EMBEDDING)
def test_texts_are_embedded(outcomes, vectors, record_client, provider):
    record_client(EMBEDDING[provider].dialect, EMBEDDING[provider].route, f"litellm ({provider})")
    outcome = outcomes["embedding", provider]
    assert "rows" in outcome, outcome
    assert_same_directions(outcome["rows"], vectors)


@pytest.mark.parametrize("provider", RERANKING)
def test_documents_are_reranked(outcomes, scores, record_client, provider):
    way = RERANKING[provider]
    record_client(way.dialect, way.route, f"litellm ({provider})")
    outcome = outcomes["rerank", provider]
    assert "rows" in outcome, outcome
    ranked = [(index, score) for index, score, _ in outcome["rows"]]
    if way.dialect == "NIM":
        ranked = [(index, 1 / (1 + math.exp(-logit))) for index, logit in ranked]
    assert_same_ranking(ranked, scores, way.more.get("top_n"))
    if provider != "infinity":
        assert [text for _, _, text in outcome["rows"]] == [TEXTS[index] for index, _, _ in outcome["rows"]]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_raised_as_its_own_errors(outcomes, name):
    assert outcomes["wrong", name]["error"] == WRONG[name][2], outcomes["wrong", name]

"""The check that servers answer with the model's vectors, before their speed is measured."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from benchmarks.model import LEAST_COSINE, MODEL_NAME, check_vectors

CONNECTIONS = 16
"""Requests, each on a new connection: with several API processes, each is likely to get some of them."""


def embeddings_body(texts: str | Sequence[str], *, model: str = MODEL_NAME, encoding_format: str = "float") -> str:
    """Return the body of a request for vectors."""
    return json.dumps({"model": model, "input": texts, "encoding_format": encoding_format})


def bodies_of(texts: Sequence[str], batch: int = 1, *, model: str = MODEL_NAME) -> list[str]:
    """Return requests for vectors of ``batch`` texts each."""
    if batch == 1:
        return [embeddings_body(text, model=model) for text in texts]
    return [embeddings_body(texts[begin : begin + batch], model=model) for begin in range(0, len(texts), batch)]


def vectors_of(document: dict[str, Any]) -> np.ndarray:
    """Return the vectors of an answer, [texts, dimensions], whether they are numbers or base64."""
    rows = [item["embedding"] for item in sorted(document["data"], key=lambda item: item["index"])]
    decoded = [np.frombuffer(base64.b64decode(row), dtype="<f4") if isinstance(row, str) else row for row in rows]
    return np.array(decoded, dtype=np.float32)


async def ask(url: str, body: str) -> httpx.Response:
    """Send one request on a new connection. Raises ``HTTPStatusError`` if the answer is an error."""
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        answer = await client.post(f"{url}/v1/embeddings", content=body, headers={"Content-Type": "application/json"})
    return answer.raise_for_status()


async def check_answers(
    url: str, texts: Sequence[str], oracle: np.ndarray, model: str = MODEL_NAME, least_cosine: float = LEAST_COSINE
) -> float:
    """Return the least cosine of a server's vectors with the oracle's, texts sent alone and together.

    Raises ``WrongAnswerError``.
    """
    together = await ask(url, embeddings_body(list(texts), model=model))
    alone = [await ask(url, body) for body in bodies_of(texts[:CONNECTIONS], model=model)]
    vectors = np.concatenate([vectors_of(answer.json()) for answer in alone])
    cosine = check_vectors(vectors_of(together.json()), oracle, least_cosine)
    return min(cosine, check_vectors(vectors, oracle[: len(vectors)], least_cosine))

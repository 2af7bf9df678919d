"""A folder that is served for real: the engine and the model of the package, asked through a socket."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from attrs import define

from tests.conftest import UNHURRIED, client_of, listening, running
from tests.cpu_backend import BY_TORCH
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.service import Service
from trio_pool_serve.types import Vectors

Record = Callable[[str, str, str, float], None]
"""The fixture ``record_agreement``."""

WHOLE = {"truncate_prompt_tokens": -1}
"""Cut what is too long at the model's limit, as the oracles do."""


@define(eq=False)
class AskedFolder:
    """Asks the routes about the one model, and reads the numbers of their answers."""

    client: httpx.AsyncClient
    service: Service

    async def post(self, route: str, **body: Any) -> Any:
        """Return the JSON of an answer, which must be a good one."""
        answer = await self.client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def embeddings(self, texts: Sequence[str], **fields: Any) -> Vectors:
        """``/v1/embeddings``: float32, shape (texts, dimensions)."""
        answer = await self.post("/v1/embeddings", input=list(texts), **fields)
        return np.array([item["embedding"] for item in in_order(answer["data"])], dtype=np.float32)

    async def pooled(self, texts: Sequence[str], **fields: Any) -> list[Any]:
        """``/pooling``: what each text gives, as it is in the answer."""
        answer = await self.post("/pooling", input=list(texts), **WHOLE, **fields)
        return [item["data"] for item in in_order(answer["data"])]

    async def scores(self, first: Sequence[str] | str, second: Sequence[str], **fields: Any) -> Vectors:
        """``/score``: float32, shape (pairs,)."""
        answer = await self.post("/score", text_1=first, text_2=list(second), **WHOLE, **fields)
        return np.array([item["score"] for item in in_order(answer["data"])], dtype=np.float32)

    async def reranked(self, query: str, documents: Sequence[str], **fields: Any) -> Vectors:
        """``/rerank``: scores in the documents' order, float32; the answer itself must have the best first."""
        answer = await self.post("/rerank", query=query, documents=list(documents), **WHOLE, **fields)
        return unranked(answer["results"], "relevance_score", len(documents))

    async def reranked_as_tei(self, query: str, texts: Sequence[str], **fields: Any) -> Vectors:
        """``/rerank`` with ``texts``: as ``reranked``."""
        return unranked(await self.post("/rerank", query=query, texts=list(texts), **fields), "score", len(texts))

    async def scores_by_route(
        self, queries: Sequence[str], documents: Sequence[str]
    ) -> Mapping[str, Sequence[Vectors]]:
        """Each query's scores with all documents, by every route that gives them."""
        return {
            "/score": [await self.scores(query, documents) for query in queries],
            "/rerank": [await self.reranked(query, documents) for query in queries],
            "/rerank with texts": [await self.reranked_as_tei(query, documents) for query in queries],
        }


def one_of(families: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return the parameters of a test that serves families: the chosen ones, and the others of their kinds as slow.

    That every family agrees with its oracle is shown in each run below HTTP, where it takes a fraction of the time.
    """
    families = [family if isinstance(family, tuple) else (family,) for family in families]
    chosen = tuple(family if isinstance(family, tuple) else (family,) for family in chosen)
    assert set(chosen) < set(families)
    return [pytest.param(*family, marks=() if family in chosen else pytest.mark.slow) for family in families]


def of_words(texts: Sequence[str], rows: Sequence[Any] | None = None) -> list[Any]:
    """Return the rows of the texts that are not empty, by default these texts: TEI's routes refuse empty ones."""
    return [row for text, row in zip(texts, texts if rows is None else rows, strict=True) if text]


def in_order(items: Sequence[Any]) -> Sequence[Any]:
    """Return the items, which must be in the order of the inputs."""
    assert [item["index"] for item in items] == list(range(len(items)))
    return items


def unranked(items: Sequence[Any], name: str, count: int) -> Vectors:
    """Return the numbers of ``name`` in the order of the inputs; they must come greatest first."""
    ranked = [item[name] for item in items]
    assert ranked == sorted(ranked, reverse=True)
    assert sorted(item["index"] for item in items) == list(range(count))
    return np.array([item[name] for item in sorted(items, key=lambda item: item["index"])], dtype=np.float32)


@asynccontextmanager
async def serving_folder(path: Path, **loading: Any) -> AsyncIterator[AskedFolder]:
    """Serve a folder in float32 on a real socket until the block is left."""
    config = Config(
        models=(str(path),),
        loading=ModelConfig(dtype="float32", device="cpu", **BY_TORCH | loading),
        scheduling=UNHURRIED,
    )
    async with (
        running(Service(config)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        yield AskedFolder(client, service)


def farthest(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest difference of any number, row by row; the rows must have the same shapes."""
    pairs = [(np.asarray(a, dtype=np.float32), np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]
    # The vectors of no tokens are [] in JSON, however wide they would be.
    assert [a.shape if a.size else 0 for a, _ in pairs] == [b.shape if b.size else 0 for _, b in pairs]
    return max(float(np.abs(a - b).max()) for a, b in pairs if b.size)

"""Rankings: documents by their scores, best first, for every dialect that reranks."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.fields.embedding_responses import Usage
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import text_of
from trio_pool_serve.tasks.score import ScoreJob, Scores, score


def ranked(scores: npt.NDArray[np.float32], top_n: int | None = None) -> list[tuple[int, float]]:
    """Return indices and scores of the best ``top_n`` of scores, shape (documents,), ties in order. 0 is all."""
    best = np.argsort(-scores, kind="stable")[: top_n or None]
    return list(zip(best.tolist(), scores[best].tolist(), strict=True))


@frozen(kw_only=True)
class ApiVersion:
    """The version of the API, not of the server."""

    version: str


@frozen(kw_only=True)
class Meta:
    """The ``meta`` of each response of Cohere's API."""

    api_version: ApiVersion
    billed_units: dict[str, int]


def meta_of(version: str, **billed_units: int) -> Meta:
    """Return the ``meta`` of a response of a version of the API."""
    return Meta(api_version=ApiVersion(version=version), billed_units=billed_units)


@frozen
class RerankDocument:
    """A document as an object; only its text is ranked."""

    text: str


@frozen
class RerankResult:
    """One document's index in the request, and its score; with ``return_documents``, the document itself."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


@frozen
class RankedItem:
    """A result as Voyage's clients read it; with ``return_documents``, the document itself."""

    index: int
    relevance_score: float
    document: str | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class RankedDocuments:
    """The documents, best first. Clients of vLLM read ``model`` and ``usage``, clients of Cohere read ``meta``."""

    id: str
    results: list[RerankResult]
    meta: Meta
    model: str
    usage: Usage


async def respond_ranking(
    call: Call[Any, ScoreJob],
    write: Callable[[Scores, list[Any]], object],
    *,
    top_n: int | None,
    result: Callable[[int, float, Any], object] = RerankResult,
    document: Callable[[str], object] | None,
) -> HttpResponse:
    """Rerank, and respond with ``write(scores, results)``, where ``result(index, score, document)`` makes each result.

    ``document`` makes the document that a result shows of its text; with ``None`` it shows none. Errors: as ``score``.
    Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.context)
    ranking = ranked(scores.values, top_n)
    texts = [text_of(call.job.documents[index]) for index, _ in ranking] if document else []

    def encode() -> HttpResponse:
        documents = list(map(document, texts)) if document else [msgspec.UNSET] * len(ranking)
        results = [result(*rank, shown) for rank, shown in zip(ranking, documents, strict=True)]
        return HttpResponse.json(write(scores, results))

    return await call.encode(encode, rows=len(ranking), nbytes=sum(map(len, texts)))


async def respond_results(
    call: Call[Any, ScoreJob],
    *,
    response: Callable[..., RankedDocuments],
    version: str,
    id_prefix: str = "",
    with_texts: bool = False,
    with_data: bool = False,
) -> HttpResponse:
    """Rerank as ``respond_ranking``, with the response of a version of Cohere's API.

    ``with_texts`` is the default of ``return_documents``. ``with_data`` adds the results as Voyage's clients read them,
    with the documents if ``return_documents`` is true.
    """
    given = call.wire.return_documents

    def item(result: RerankResult) -> RankedItem:
        document = result.document
        text = document.text if given and isinstance(document, RerankDocument) else msgspec.UNSET
        return RankedItem(result.index, result.relevance_score, text)

    def write(scores: Scores, results: list[RerankResult]) -> RankedDocuments:
        return response(
            **({"data": list(map(item, results))} if with_data else {}),
            id=call.response_id(id_prefix),
            results=results,
            meta=meta_of(version, search_units=1),
            model=call.model.name,
            usage=Usage.of(scores.prompt_tokens),
        )

    wanted = with_texts if given is None else given
    return await respond_ranking(call, write, top_n=call.wire.top_n, document=RerankDocument if wanted else None)

"""``/rerank`` of vLLM, Jina, Cohere's version 1, infinity and litellm: documents, best first.

One response serves them all: the clients of each use some of its fields.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from attrs import frozen

from trio_pool_serve.api.dialects.cohere.meta import Meta, meta_of
from trio_pool_serve.api.dialects.vllm.scoring import SCORE_FIELD_NAMES, RerankOptions
from trio_pool_serve.api.fields.contents import ContentInput, WireContent
from trio_pool_serve.api.fields.embedding_responses import Usage
from trio_pool_serve.api.fields.numbers import require_some
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import ScoreInput, text_of
from trio_pool_serve.tasks.score import ScoreJob, Scores, score


@frozen
class RerankDocument:
    """A document as an object; only its text is ranked."""

    text: str


@frozen(kw_only=True)
class DocumentObject:
    """A document as an object: a text, or a content in parts."""

    text: str | None = None
    content: WireContent | None = None

    def side(self, network: NetworkConfig, place: str) -> ScoreInput:
        """Return the document; ``place`` is where it is in the request. Raises ``InvalidRequestError``."""
        if self.content is not None:
            return ContentInput(content=self.content).prompt(network, place)
        if self.text is None:
            raise InvalidRequestError("A document has neither text nor content.", param="documents")
        return self.text


@frozen(kw_only=True)
class RerankRequest(RerankOptions):
    """The body of ``/rerank``. ``raw_scores`` is infinity's opposite of ``use_activation``."""

    query: str | ContentInput
    documents: str | DocumentObject | list[str | DocumentObject]
    raw_scores: bool | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        require_some(given, network, param="documents")
        require_top(self.top_n)
        queries = [self.query if isinstance(self.query, str) else self.query.prompt(network, "query")]
        documents = [
            document if isinstance(document, str) else document.side(network, f"documents[{index}]")
            for index, document in enumerate(given)
        ]
        return self.score_job(queries, documents)


@frozen
class RerankResult:
    """One document's index in the request, and its score; with ``return_documents``, the document itself."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class RankedDocuments:
    """The documents, best first. Clients of vLLM read ``model`` and ``usage``, clients of Cohere read ``meta``."""

    id: str
    results: list[RerankResult]
    meta: Meta
    model: str
    usage: Usage


@frozen(kw_only=True)
class RerankResponse(RankedDocuments):
    """The response of ``/rerank``."""

    object: Literal["rerank"] = "rerank"


async def respond_ranking(
    call: Call[Any, ScoreJob],
    write: Callable[[Scores, list[Any]], object],
    *,
    top_n: int | None,
    result: Callable[[int, float, Any], object] = RerankResult,
    document: Callable[[str], object] | None,
) -> HttpResponse:
    """Rerank, and respond with ``write(scores, results)``, where ``result(index, score, document)`` makes each result.

    ``document`` makes what a result shows of its text; ``None``: nothing. Raises what ``score`` raises. Cancellation:
    at once.
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
    response: type[RankedDocuments],
    version: str,
    id_prefix: str = "",
    with_texts: bool = False,
) -> HttpResponse:
    """Rerank as ``respond_ranking``, with the response of a version of Cohere's API.

    ``with_texts`` is what the request has by default as its ``return_documents``.
    """

    def write(scores: Scores, results: list[RerankResult]) -> RankedDocuments:
        return response(
            id=call.response_id(id_prefix),
            results=results,
            meta=meta_of(version, search_units=1),
            model=call.model.name,
            usage=Usage.of(scores.prompt_tokens),
        )

    wanted = with_texts if call.wire.return_documents is None else call.wire.return_documents
    return await respond_ranking(call, write, top_n=call.wire.top_n, document=RerankDocument if wanted else None)


RERANK: Endpoint[RerankRequest, ScoreJob] = Endpoint(
    paths=("/rerank", "/v1/rerank"),
    wire=RerankRequest,
    respond=partial(respond_results, response=RerankResponse, version="1", id_prefix="rerank-", with_texts=True),
    field_names=SCORE_FIELD_NAMES,
    response=RerankResponse,
    summary="Sort documents by how well they fit a query, best first.",
    example={
        "query": "What does a nursery do?",
        "documents": ["Bread needs flour.", "A nursery owns its tasks."],
        "top_n": 1,
    },
)

"""Cohere's ``/v2/rerank``."""

from functools import partial

from attrs import frozen

from trio_pool_serve.api.dialects.cohere.meta import Meta, meta_of
from trio_pool_serve.api.fields.input_fields import require_few
from trio_pool_serve.api.fields.numbers import Priority, TokenCount, TopN
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob, Scores, score


@frozen(kw_only=True)
class RerankDocument:
    """A document as an object; only its text is ranked."""

    text: str


@frozen(kw_only=True)
class RerankRequest:
    """The body of ``/v2/rerank``. Documents that are too long are truncated, as Cohere does it."""

    query: str
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: TopN | None = None
    max_tokens_per_doc: TokenCount | None = None
    priority: Priority | None = None
    return_documents: bool | None = None
    """A field of version 1; responses of version 2 have no documents."""

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_few(self.documents, network, param="documents")
        require_top(self.top_n)
        return ScoreJob(
            queries=[self.query],
            documents=[document if isinstance(document, str) else document.text for document in self.documents],
            input_params=InputParams(truncate_to=-1),
            max_document_tokens=self.max_tokens_per_doc,
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class RerankResult:
    """One document's index in the request, and its score."""

    index: int
    relevance_score: float


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first."""

    id: str
    results: list[RerankResult]
    meta: Meta


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Raises what ``score`` raises. Cancellation: at once."""
    scores = await score(call.model, call.job, call.timings)
    return await call.encode(partial(_encode, call, scores), rows=len(scores.values), nbytes=scores.values.nbytes)


def _encode(call: Call[RerankRequest, ScoreJob], scores: Scores) -> HttpResponse:
    ranking = ranked(scores.values, call.wire.top_n)
    results = [RerankResult(index=index, relevance_score=value) for index, value in ranking]
    response = RerankResponse(id=call.request_id, results=results, meta=meta_of("2", search_units=1))
    return HttpResponse.json(response)


RERANK_ENDPOINT = Endpoint(
    paths=("/v2/rerank",),
    wire=RerankRequest,
    respond=respond_rerank,
    field_names={"max_document_tokens": "max_tokens_per_doc"},
    response=RerankResponse,
    summary="Sort documents by how well they fit a query.",
    example={
        "query": "What is a nursery?",
        "documents": ["A nursery owns its tasks.", "Bread needs flour."],
        "top_n": 1,
    },
)

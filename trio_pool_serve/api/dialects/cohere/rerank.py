"""Cohere's ``/v2/rerank``."""

from functools import partial

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.dialects.cohere.meta import Meta, meta_of
from trio_pool_serve.api.dialects.vllm.scoring import SCORE_FIELD_NAMES, RerankOptions
from trio_pool_serve.api.fields.embedding_responses import Usage
from trio_pool_serve.api.fields.limits import require_few
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.prompts import text_of
from trio_pool_serve.tasks.score import ScoreJob, Scores, score


@frozen(kw_only=True)
class RerankDocument:
    """A document as an object; only its text is ranked."""

    text: str


@frozen(kw_only=True)
class RerankRequest(RerankOptions):
    """The body of ``/v2/rerank``, which clients of vLLM send its options too.

    Documents that are too long are truncated, as Cohere does it. ``return_documents`` is a field of version 1.
    """

    query: str
    documents: str | RerankDocument | list[str | RerankDocument]

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        require_few(given, network, param="documents")
        require_top(self.top_n)
        documents = [document if isinstance(document, str) else document.text for document in given]
        job = self.score_job([self.query], documents)
        if self.truncate_prompt_tokens is not None:
            return job
        return evolve(job, input_params=evolve(job.input_params, truncate_to=-1))


@frozen(kw_only=True)
class RerankResult:
    """One document's index in the request, and its score; with ``return_documents``, the document itself."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first; ``model`` and ``usage`` are for clients that come from vLLM."""

    id: str
    results: list[RerankResult]
    meta: Meta
    model: str
    usage: Usage


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Raises what ``score`` raises. Cancellation: at once."""
    scores = await score(call.model, call.job, call.context)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_documents else None
    nbytes = scores.values.nbytes + sum(map(len, texts or ()))
    return await call.encode(partial(_encode, call, scores, texts), rows=len(scores.values), nbytes=nbytes)


def _encode(call: Call[RerankRequest, ScoreJob], scores: Scores, texts: list[str] | None) -> HttpResponse:
    results = [
        RerankResult(
            index=index,
            relevance_score=value,
            document=msgspec.UNSET if texts is None else RerankDocument(text=texts[index]),
        )
        for index, value in ranked(scores.values, call.wire.top_n)
    ]
    response = RerankResponse(
        id=call.wire.request_id or call.request_id,
        results=results,
        meta=meta_of("2", search_units=1),
        model=call.model.name,
        usage=Usage.of(scores.prompt_tokens),
    )
    return HttpResponse.json(response)


RERANK_ENDPOINT = Endpoint(
    paths=("/v2/rerank",),
    wire=RerankRequest,
    respond=respond_rerank,
    field_names=SCORE_FIELD_NAMES,
    response=RerankResponse,
    summary="Sort documents by how well they fit a query.",
    example={
        "query": "What is a nursery?",
        "documents": ["A nursery owns its tasks.", "Bread needs flour."],
        "top_n": 1,
    },
)

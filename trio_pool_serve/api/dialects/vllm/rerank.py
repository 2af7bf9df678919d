"""``/rerank`` of vLLM, Jina, Cohere's version 1, infinity and litellm: documents, best first.

One response serves them all: the clients of each use some of its fields.
"""

from typing import Literal

import msgspec
from attrs import frozen

from trio_pool_serve.api.dialects.cohere.meta import Meta, meta_of
from trio_pool_serve.api.dialects.vllm.scoring import SCORE_FIELD_NAMES, RerankOptions
from trio_pool_serve.api.fields.contents import ContentInput, WireContent
from trio_pool_serve.api.fields.embedding_responses import Usage
from trio_pool_serve.api.fields.limits import require_few
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ScoreInput, text_of
from trio_pool_serve.tasks.score import ScoreJob, score


@frozen
class RerankDocument:
    """A document in a response: its text."""

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
        if not given:
            raise EmptyInputError("documents is empty.", param="documents")
        require_few(given, network, param="documents")
        require_top(self.top_n)
        queries = [self.query if isinstance(self.query, str) else self.query.prompt(network, "query")]
        documents = [
            document if isinstance(document, str) else document.side(network, f"documents[{index}]")
            for index, document in enumerate(given)
        ]
        return self.score_job(queries, documents)


@frozen(kw_only=True)
class RerankResult:
    """One document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class RerankResponse:
    """The response of ``/rerank``; ``meta`` is for Cohere's clients."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]
    meta: Meta
    object: Literal["rerank"] = "rerank"


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Raises what ``score`` raises. Cancellation: at once."""
    scores = await score(call.model, call.job, call.context)
    ranking = ranked(scores.values, call.wire.top_n)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_documents is not False else None

    def encode() -> HttpResponse:
        results = [
            RerankResult(
                index=index,
                relevance_score=value,
                document=msgspec.UNSET if texts is None else RerankDocument(texts[index]),
            )
            for index, value in ranking
        ]
        response = RerankResponse(
            id=f"rerank-{call.wire.request_id or call.request_id}",
            model=call.model.name,
            usage=Usage.of(scores.prompt_tokens),
            results=results,
            meta=meta_of("1", search_units=1),
        )
        return HttpResponse.json(response)

    characters = 0 if texts is None else sum(len(texts[index]) for index, _ in ranking)
    return await call.encode(encode, rows=len(ranking), nbytes=characters)


RERANK: Endpoint[RerankRequest, ScoreJob] = Endpoint(
    paths=("/rerank", "/v1/rerank"),
    wire=RerankRequest,
    respond=respond_rerank,
    field_names=SCORE_FIELD_NAMES,
    response=RerankResponse,
    summary="Sort documents by how well they fit a query, best first.",
    example={
        "query": "What does a nursery do?",
        "documents": ["Bread needs flour.", "A nursery owns its tasks."],
        "top_n": 1,
    },
)

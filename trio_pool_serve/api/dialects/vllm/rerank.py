"""``/rerank`` as vLLM, Jina, Cohere's v1, infinity and litellm speak it: documents, best first.

One answer is made for all of them: each reads some of its fields.
"""

from typing import Any, Literal

import msgspec
from attrs import Factory, frozen

from trio_pool_serve.api.dialects.vllm.score import score_job
from trio_pool_serve.api.fields.contents import ContentInput, WireContent
from trio_pool_serve.api.fields.embedding_answers import Usage
from trio_pool_serve.api.fields.numbers import Priority, TokenCount, TopN, TruncationLength
from trio_pool_serve.api.fields.prompts import require_few
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.tasks.score_inputs import ScoreInput, text_of


@frozen
class RerankDocument:
    """A document in an answer: its text."""

    text: str


@frozen(kw_only=True)
class AskedDocument:
    """A document as an object: a text, or a content in parts."""

    text: str | None = None
    content: WireContent | None = None

    def side(self, network: NetworkConfig, place: str) -> ScoreInput:
        """Return the document that stands at ``place``. Raises ``InvalidRequestError``."""
        if self.content is not None:
            return ContentInput(content=self.content).prompt(network, place)
        if self.text is None:
            raise InvalidRequestError("A document has neither text nor content.", param="documents")
        return self.text


@frozen(kw_only=True)
class RerankRequest:
    """The body of ``/rerank``. Every optional field may be null.

    ``raw_scores`` is infinity's opposite of ``use_activation``, of which ``activation`` is an old name. Documents
    have no field but ``text``, so ``rank_fields`` chooses nothing; none is cut into chunks.
    """

    query: str | ContentInput
    documents: list[str | AskedDocument]
    model: str | None = None
    top_n: TopN | None = None
    return_documents: bool | None = None
    max_tokens_per_query: TokenCount | None = None
    max_tokens_per_doc: TokenCount | None = None
    instruction: str | None = None
    truncate_prompt_tokens: TruncationLength | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    raw_scores: bool | None = None
    rank_fields: Any = None
    max_chunks_per_doc: Any = None
    user: str | None = None
    priority: Priority | None = None
    request_id: str | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        if not self.documents:
            raise EmptyInputError("documents is empty.", param="documents")
        require_few(self.documents, network, param="documents")
        require_top(self.top_n)
        raw = self.raw_scores or False in (self.use_activation, self.activation)
        return ScoreJob(
            queries=[self.query if isinstance(self.query, str) else self.query.prompt(network, "query")],
            documents=[
                document if isinstance(document, str) else document.side(network, f"documents[{index}]")
                for index, document in enumerate(self.documents)
            ],
            reading=InputParams(
                truncate_to=self.truncate_prompt_tokens,
                truncation_side=self.truncation_side or "right",
                instruction=self.instruction,
            ),
            max_query_tokens=self.max_tokens_per_query,
            max_document_tokens=self.max_tokens_per_doc,
            activation="raw" if raw else "score",
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class RerankResult:
    """One document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType


@frozen(kw_only=True)
class ApiVersion:
    """Which of Cohere's this answer is one of."""

    version: str = "1"


@frozen(kw_only=True)
class BilledUnits:
    """What Cohere would ask money for."""

    search_units: int = 1


@frozen(kw_only=True)
class RerankMeta:
    """What Cohere's clients read besides the results."""

    api_version: ApiVersion = Factory(ApiVersion)
    billed_units: BilledUnits = Factory(BilledUnits)


@frozen(kw_only=True)
class RerankResponse:
    """The answer of ``/rerank``."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]
    meta: RerankMeta = Factory(RerankMeta)
    object: Literal["rerank"] = "rerank"


async def answer_rerank(call: Call[RerankRequest, ScoreJob]) -> Answer:
    """Rerank. Raises what ``score_job`` raises. Cancellation: at once."""
    scores = await score_job(call)
    ranking = ranked(scores.values, call.wire.top_n)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_documents is not False else None

    def encode() -> Answer:
        results = [
            RerankResult(
                index=index,
                relevance_score=value,
                document=msgspec.UNSET if texts is None else RerankDocument(texts[index]),
            )
            for index, value in ranking
        ]
        answer = RerankResponse(
            id=f"rerank-{call.wire.request_id or call.request_id}",
            model=call.model.name,
            usage=Usage.of(scores.prompt_tokens),
            results=results,
        )
        return Answer(msgspec.json.encode(answer))

    characters = 0 if texts is None else sum(len(texts[index]) for index, _ in ranking)
    return await call.encode(encode, rows=len(ranking), nbytes=characters)


RERANK: Endpoint[RerankRequest, ScoreJob] = Endpoint(
    paths=("/rerank", "/v1/rerank"),
    wire=RerankRequest,
    read=RerankRequest.job,
    answer=answer_rerank,
    response=RerankResponse,
    summary="Sort documents by how well they fit a query, best first.",
    example={
        "query": "What does a nursery do?",
        "documents": ["Bread needs flour.", "A nursery owns its tasks."],
        "top_n": 1,
    },
)

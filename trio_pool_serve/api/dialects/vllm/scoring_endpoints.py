"""``/score``: how well texts match, one by one or one with many; and ``/rerank``: documents, best first."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.embedding_responses import ListResponse, encode_list
from trio_pool_serve.api.fields.field_values import (
    TokenCount,
    TokenLimit,
    TopN,
    refuse_given,
    refused,
    require_few,
    require_least,
    require_some,
    wants_logits,
)
from trio_pool_serve.api.fields.input_fields import RequestOptions
from trio_pool_serve.api.fields.messages import AS_LOADED, ContentInput, WireContent
from trio_pool_serve.api.fields.ranking import RankedDocuments, RankedItem, respond_results
from trio_pool_serve.api.http.endpoint import Call, Endpoint, FieldNames
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, MissingFieldError, require_request
from trio_pool_serve.prompts import ScoreInput
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.score import ScoreJob, score

SIDE_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items"))
"""The names of the two sides; vLLM has renamed them more than once."""

WireSide: TypeAlias = str | ContentInput | list[str | ContentInput]
"""A text, a content in parts, or several."""

SCORE_FIELD_NAMES: FieldNames = {
    "prompts": None,  # of either side, or both together
    "truncate_to": "truncate_prompt_tokens",
    "max_query_tokens": "max_tokens_per_query",
    "max_document_tokens": "max_tokens_per_doc",
    "queries": tuple(dict.fromkeys(first for first, _ in SIDE_NAMES)),
    "documents": tuple(second for _, second in SIDE_NAMES),
}

RERANK_FIELD_NAMES: FieldNames = {**SCORE_FIELD_NAMES, "queries": "query", "documents": "documents"}


@frozen(kw_only=True)
class ScoreOptions(RequestOptions):
    """The options of ``/score`` and ``/rerank``; ``activation`` is an old name of ``use_activation``.

    An ``instruction`` in ``chat_template_kwargs`` overrides the field.
    """

    max_tokens_per_query: TokenLimit | None = None
    max_tokens_per_doc: TokenLimit | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    activation: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = refused(AS_LOADED, [{}])

    def score_job(
        self, queries: Sequence[ScoreInput], documents: Sequence[ScoreInput], truncate_to: int | None = None
    ) -> ScoreJob:
        """Return the job for these inputs, by default truncated to that length. Raises ``InvalidRequestError``."""
        return ScoreJob(
            queries=queries,
            documents=documents,
            input_params=InputParams(
                truncate_to=truncate_to if self.truncate_prompt_tokens is None else self.truncate_prompt_tokens,
                truncation_side=self.truncation_side,
                instruction=self._instruction(),
            ),
            max_query_tokens=self.max_tokens_per_query or None,
            max_document_tokens=self.max_tokens_per_doc or None,
            activation="raw" if wants_logits(self) else "score",
            priority=self.priority or 0,
        )

    def _instruction(self) -> str | None:
        """Return the instruction of either field. Other variables of the template are its own."""
        kwargs = self.chat_template_kwargs or {}
        others = sorted(kwargs.keys() - {"instruction", "add_generation_prompt"})
        require_request(
            not others, f"can set only `instruction` here, not {', '.join(others)}.", at="chat_template_kwargs"
        )
        instruction = self.instruction if kwargs.get("instruction") is None else kwargs["instruction"]
        require_request(isinstance(instruction, str | None), "must be a string.", at="chat_template_kwargs.instruction")
        return instruction


@frozen(kw_only=True)
class RerankOptions(ScoreOptions):
    """The options of every dialect's rankings; the last two are from version 1 of Cohere's API."""

    top_n: TopN | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = refused("only the text of a document is ranked", [["text"], []])
    max_chunks_per_doc: TokenCount | None = refused("documents are not cut into chunks", [1])


@frozen(kw_only=True)
class ScoreRequest(ScoreOptions):
    """The body of ``/score``: two sides, by any of their ``SIDE_NAMES``. Every optional field may be null."""

    text_1: WireSide | None = None
    text_2: WireSide | None = None
    queries: WireSide | None = None
    documents: WireSide | None = None
    items: WireSide | None = None
    data_1: WireSide | None = None
    data_2: WireSide | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        first, second = self._names()
        ones, others = self._side(first, max_inputs), self._side(second, max_inputs)
        require_request(
            len(ones) in (1, len(others)),
            f"Input lengths must be either 1:1, 1:N or N:N, not {len(ones)} {first} and {len(others)} {second}.",
            param=first,
        )
        return self.score_job(ones, others)

    def _names(self) -> tuple[str, str]:
        names = {name for pair in SIDE_NAMES for name in pair}
        missing = {name for name in names if getattr(self, name) is None}
        given = [pair for pair in SIDE_NAMES if missing.isdisjoint(pair)]
        if len(given) == 1:
            refuse_given(self, sorted(names.difference(given[0])), f"cannot be sent with {' and '.join(given[0])}")
            return given[0]
        pairs = ", or ".join(map(" and ".join, SIDE_NAMES))
        alone = [pair for pair in SIDE_NAMES if len(missing.intersection(pair)) == 1]
        partners = [name for pair in alone for name in pair if name in missing]
        if partners and not given:
            raise MissingFieldError(*partners)
        raise InvalidRequestError(f"Send {'only one' if given else 'both'} of {pairs}.")

    def _side(self, name: str, max_inputs: int) -> Sequence[ScoreInput]:
        given: WireSide = getattr(self, name)
        sides = given if isinstance(given, list) else [given]
        if not sides:
            element = "text" if any(name == first for first, _ in SIDE_NAMES) else "text_pair"
            raise EmptyInputError(f"{name} is empty. At least one {element} element must be given.", param=name)
        require_few(len(sides), max_inputs, param=name)
        return [
            side
            if isinstance(side, str)
            else side.prompt(max_inputs, name if sides is not given else f"{name}[{index}]")
            for index, side in enumerate(sides)
        ]


@frozen(kw_only=True)
class ScoreItem:
    """How well one document matches its query."""

    index: int
    score: float
    object: Literal["score"] = "score"


@frozen(kw_only=True)
class ScoreResponse(ListResponse[ScoreItem]):
    """The response of ``/score``."""


async def respond_score(call: Call[ScoreRequest, ScoreJob]) -> HttpResponse:
    """Score. Errors: as ``score``. Cancellation: at once."""
    scores = await score(call.model, call.job, call.context)
    items = (ScoreItem(index=index, score=float(value)) for index, value in enumerate(scores.values))
    encode = partial(encode_list, call, "score-", ScoreResponse, items, tokens=scores.prompt_tokens)
    return await call.encode(encode, rows=len(scores.values), nbytes=scores.values.nbytes)


@frozen(kw_only=True)
class DocumentObject:
    """A document as an object: a text, or a content in parts."""

    text: str | None = None
    content: WireContent | None = None

    def side(self, max_inputs: int, place: str) -> ScoreInput:
        """Return the document; ``place`` is where it is in the request. Raises ``InvalidRequestError``."""
        if self.content is not None:
            return ContentInput(content=self.content).prompt(max_inputs, place)
        if self.text is None:
            raise InvalidRequestError.at(place, "has neither `text` nor `content`.")
        return self.text


@frozen(kw_only=True)
class RerankRequest(RerankOptions):
    """The body of ``/rerank``. ``raw_scores`` is infinity's opposite of ``use_activation``."""

    query: str | ContentInput
    documents: str | DocumentObject | list[str | DocumentObject]
    raw_scores: bool | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        require_some(given, max_inputs, param="documents")
        require_least(self.top_n)
        queries = [self.query if isinstance(self.query, str) else self.query.prompt(max_inputs, "query")]
        documents = [
            document if isinstance(document, str) else document.side(max_inputs, f"documents[{index}]")
            for index, document in enumerate(given)
        ]
        return self.score_job(queries, documents)


@frozen(kw_only=True)
class RerankResponse(RankedDocuments):
    """The response of ``/rerank``. Clients of Voyage, which use ``/v1/rerank``, too, read ``data`` there."""

    data: list[RankedItem] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["rerank"] = "rerank"


SCORING_ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint(
        paths=("/score", "/v1/score"),
        wire=ScoreRequest,
        respond=respond_score,
        field_names=SCORE_FIELD_NAMES,
        response=ScoreResponse,
        summary="Score how well texts match: one with one, one with many, or many one by one.",
        example={"text_1": "What does a nursery do?", "text_2": ["A nursery owns its tasks.", "Bread needs flour."]},
    ),
    *(
        Endpoint(
            paths=(path,),
            wire=RerankRequest,
            respond=partial(
                respond_results,
                response=RerankResponse,
                version="1",
                id_prefix="rerank-",
                with_texts=True,
                with_data=path == "/v1/rerank",
            ),
            field_names=RERANK_FIELD_NAMES,
            response=RerankResponse,
            summary="Sort documents by how well they fit a query, best first.",
            example={
                "query": "What does a nursery do?",
                "documents": ["Bread needs flour.", "A nursery owns its tasks."],
                "top_n": 1,
            },
        )
        for path in ("/rerank", "/v1/rerank")
    ),
)

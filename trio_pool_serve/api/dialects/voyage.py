"""The Voyage dialect: ``/v1/embeddings`` with its fields, ``/v1/rerank`` with ``top_k``, and images."""

from functools import partial
from typing import Any, Literal

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.dialects import jina, openai
from trio_pool_serve.api.dialects.vllm import rerank
from trio_pool_serve.api.dialects.vllm.scoring import SCORE_FIELD_NAMES
from trio_pool_serve.api.dialects.voyage_multimodal import MULTIMODAL, OutputDtype, encoding_of
from trio_pool_serve.api.fields.embedding_responses import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.given_fields import refuse_given, the_same
from trio_pool_serve.api.fields.input_types import with_input_type
from trio_pool_serve.api.fields.numbers import Dimensions, TopK
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames, WireError
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.prompts import text_of
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import check_dimensions
from trio_pool_serve.tasks.score import ScoreJob, Scores, score

EMBEDDINGS_FIELD_NAMES: FieldNames = {
    **openai.EMBEDDINGS_FIELD_NAMES,
    "truncate_to": ("truncate_prompt_tokens", "truncate", "truncation"),
    "dimensions": ("output_dimension", "dimensions"),
}


@frozen(kw_only=True)
class VoyageEmbeddingsRequest(jina.JinaEmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Voyage's fields, alongside those of OpenAI and Jina."""

    input_type: str | None = None
    output_dtype: OutputDtype | None = None
    output_dimension: Dimensions | None = None
    truncation: bool | None = None

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        if self.output_dtype is None:
            return super().encoding
        return encoding_of(self.encoding_format, self.output_dtype, self.endianness)

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        if self.output_dtype is not None:
            refuse_given(self, ("embed_dtype", "embedding_type"), "is chosen by output_dtype here: give one of the two")
        the_same(self, "input_type", "task")
        job = super().job(network)
        input_params = job.input_params
        # Only requests with a value in one of Voyage's fields truncate by default, as Voyage does.
        has_value = any(value is not None for value in (self.input_type, self.output_dtype, self.output_dimension))
        if has_value and input_params.truncate_to is None and not input_params.refuses_longer:
            input_params = evolve(input_params, truncate_to=-1)
        return evolve(job, input_params=input_params, dimensions=the_same(self, "output_dimension", "dimensions"))


async def respond_embeddings(call: Call[VoyageEmbeddingsRequest, PoolJob]) -> HttpResponse:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    call.model.require("embed")
    check_dimensions(call.model, call.wire.output_dimension)
    param = "task" if call.wire.input_type is None else "input_type"
    job = with_input_type(call.job, getattr(call.wire, param), call.model, others=jina.TASKS, param=param)
    return await openai.respond_embeddings(evolve(call, job=job))


@frozen(kw_only=True)
class RerankRequest(rerank.RerankRequest):
    """The body of ``/v1/rerank`` with ``top_k``, alongside vLLM's fields. The response has no ``request_id``."""

    documents: list[str]  # type: ignore[assignment]
    top_k: TopK | None = None
    truncation: bool | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_top(self.top_k, least=1, param="top_k")
        the_same(self, "top_k", "top_n")
        job = super().job(network)
        if self.truncation is False:
            refuse_given(self, ("truncate_prompt_tokens",), "asks to truncate what must not be truncated")
        params, truncates = job.input_params, self.truncation is not False
        if self.truncate_prompt_tokens is None:
            params = evolve(params, truncate_to=-1 if truncates else None, refuses_longer=not truncates)
        return evolve(job, input_params=params)


@frozen(kw_only=True)
class RerankItem:
    """One document's rank; with ``return_documents``, the document itself."""

    index: int
    relevance_score: float
    document: str | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class TotalTokens:
    """Number of tokens that the model read."""

    total_tokens: int


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first."""

    data: list[RerankItem]
    model: str
    usage: TotalTokens
    object: Literal["list"] = "list"


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Raises what ``score`` raises. Cancellation: at once."""
    scores = await score(call.model, call.job, call.context)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_documents else None
    nbytes = scores.values.nbytes + sum(map(len, texts or ()))
    return await call.encode(partial(_encode, call, scores, texts), rows=len(scores.values), nbytes=nbytes)


def _encode(call: Call[RerankRequest, ScoreJob], scores: Scores, texts: list[str] | None) -> HttpResponse:
    items = [
        RerankItem(index=index, relevance_score=value, document=msgspec.UNSET if texts is None else texts[index])
        for index, value in ranked(scores.values, call.wire.top_k or call.wire.top_n)
    ]
    response = RerankResponse(data=items, model=call.model.name, usage=TotalTokens(total_tokens=scores.prompt_tokens))
    return HttpResponse.json(response)


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body of an error for Voyage's clients, and for OpenAI's: some of those send Voyage's fields."""
    status, body = openai.error_body(error)
    return status, {"detail": error.message, **body}


VOYAGE = Dialect(
    name="voyage",
    error_body=error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            discriminators=frozenset({"input_type", "output_dtype", "output_dimension", "truncation"}),
            wire=VoyageEmbeddingsRequest,
            respond=respond_embeddings,
            field_names=EMBEDDINGS_FIELD_NAMES,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "input_type": "document", "output_dtype": "int8"},
        ),
        Endpoint(
            paths=("/v1/rerank", "/rerank"),
            discriminators=frozenset({"top_k"}),
            wire=RerankRequest,
            respond=respond_rerank,
            field_names={**SCORE_FIELD_NAMES, "truncate_to": ("truncate_prompt_tokens", "truncation")},
            response=RerankResponse,
            summary="Sort documents by how well they fit a query.",
            example={
                "query": "What is a nursery?",
                "documents": ["A nursery owns its tasks.", "Bread needs flour."],
                "top_k": 1,
            },
        ),
        MULTIMODAL,
    ),
)

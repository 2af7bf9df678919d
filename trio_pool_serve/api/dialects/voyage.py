"""The Voyage dialect: ``/v1/embeddings`` with its fields, ``/v1/rerank`` with ``top_k``, and images."""

from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.jina import JinaEmbeddingsRequest
from trio_pool_serve.api.dialects.voyage_multimodal import MULTIMODAL
from trio_pool_serve.api.fields.embedding_responses import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.encodings import EmbedDtype
from trio_pool_serve.api.fields.input_types import with_input_type
from trio_pool_serve.api.fields.limits import require_few
from trio_pool_serve.api.fields.numbers import Dimensions, TopK
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames, WireError
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.input_params import truncating
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import check_dimensions
from trio_pool_serve.tasks.score import ScoreJob, Scores, score

OutputDtype: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

InputType: TypeAlias = Literal[
    "query", "document", "passage", "search_query", "search_document", "classification", "clustering"
]
"""Voyage's two, and what clients of other products send in the same field."""

EMBEDDINGS_FIELD_NAMES: FieldNames = {
    **openai.EMBEDDINGS_FIELD_NAMES,
    "truncate_to": ("truncate_prompt_tokens", "truncate", "truncation"),
    "dimensions": ("output_dimension", "dimensions"),
}


@frozen(kw_only=True)
class VoyageEmbeddingsRequest(JinaEmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Voyage's fields, alongside those of OpenAI and Jina."""

    input_type: InputType | None = None
    output_dtype: OutputDtype | None = None
    output_dimension: Dimensions | None = None
    truncation: bool | None = None

    @property
    def given_input_type(self) -> str | None:
        """What the texts are embedded for."""
        return self.input_type or self.task

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        if self.output_dtype is None:
            return super().encoding
        dtype: EmbedDtype = "float32" if self.output_dtype == "float" else self.output_dtype
        return VectorEncoding(self.encoding_format or "float", dtype, self.endianness, "output_dtype")

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        job = super().job(network)
        input_params = job.input_params
        # Only requests with a value in one of Voyage's fields truncate by default, as Voyage does.
        values = (self.input_type, self.output_dtype, self.output_dimension, self.truncation)
        truncates = any(value is not None for value in values) and False not in (self.truncation, self.truncate)
        if input_params.truncate_to is None and truncates:
            input_params = evolve(input_params, truncate_to=-1)
        if False in (self.truncation, self.truncate):
            input_params = evolve(input_params, refuses_longer=True)
        dimensions = self.dimensions if self.output_dimension is None else self.output_dimension
        return evolve(job, input_params=input_params, dimensions=dimensions)


async def respond_embeddings(call: Call[VoyageEmbeddingsRequest, PoolJob]) -> HttpResponse:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    call.model.require("embed")
    check_dimensions(call.model, call.wire.output_dimension)
    job = with_input_type(call.job, call.wire.given_input_type, call.model)
    return await openai.respond_embeddings(evolve(call, job=job))


@frozen(kw_only=True)
class RerankRequest:
    """The body of ``/v1/rerank`` with ``top_k``."""

    query: str
    documents: list[str]
    model: str | None = None
    top_k: TopK | None = None
    return_documents: bool | None = None
    truncation: bool | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_few(self.documents, network, param="documents")
        require_top(self.top_k, least=1, param="top_k")
        return ScoreJob(
            queries=[self.query],
            documents=self.documents,
            input_params=truncating(self.truncation is not False),
        )


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
    texts = sum(map(len, call.wire.documents)) if call.wire.return_documents else 0
    return await call.encode(
        partial(_encode, call, scores), rows=len(scores.values), nbytes=scores.values.nbytes + texts
    )


def _encode(call: Call[RerankRequest, ScoreJob], scores: Scores) -> HttpResponse:
    documents = call.wire.documents if call.wire.return_documents else [msgspec.UNSET] * len(scores.values)
    items = [
        RerankItem(index=index, relevance_score=value, document=documents[index])
        for index, value in ranked(scores.values, call.wire.top_k)
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
            field_names={"prompts": None, "truncate_to": "truncation"},
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

"""The Voyage dialect: ``/v1/embeddings`` with its fields, ``/v1/rerank`` with ``top_k``, and images."""

from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.jina import JinaEmbeddingsRequest
from trio_pool_serve.api.dialects.voyage_multimodal import MULTIMODAL
from trio_pool_serve.api.fields.embedding_answers import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.encodings import EmbedDtype
from trio_pool_serve.api.fields.numbers import Dimensions, TopN
from trio_pool_serve.api.fields.prompts import require_few
from trio_pool_serve.api.fields.purposes import for_purpose
from trio_pool_serve.api.fields.ranking import ranked, require_top
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, WireError
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.embed import check_dimensions
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.score import ScoreJob, Scores, score

OutputDtype: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

InputType: TypeAlias = Literal[
    "query", "document", "passage", "search_query", "search_document", "classification", "clustering"
]
"""Voyage's two; and what clients of several products send in the same field."""


@frozen(kw_only=True)
class VoyageEmbeddingsRequest(JinaEmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Voyage's fields; those of OpenAI and Jina hold beside them."""

    input_type: InputType | None = None
    output_dtype: OutputDtype | None = None
    output_dimension: Dimensions | None = None
    truncation: bool | None = None

    @property
    def purpose(self) -> str | None:
        """What the texts are for."""
        return self.input_type or self.task

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are wanted."""
        if self.output_dtype is None:
            return super().encoding
        dtype: EmbedDtype = "float32" if self.output_dtype == "float" else self.output_dtype
        return VectorEncoding(self.encoding_format or "float", dtype, self.endianness, "output_dtype")

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        job = super().job(network)
        reading = job.reading
        # A null field says nothing: whoever sends nothing else of Voyage's is refused what is too long, as ever.
        says = (self.input_type, self.output_dtype, self.output_dimension, self.truncation)
        cuts = any(value is not None for value in says) and False not in (self.truncation, self.truncate)
        if reading.truncate_to is None and cuts:
            reading = evolve(reading, truncate_to=-1)
        dimensions = self.dimensions if self.output_dimension is None else self.output_dimension
        return evolve(job, reading=reading, dimensions=dimensions)


async def answer_embeddings(call: Call[VoyageEmbeddingsRequest, PoolJob]) -> Answer:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    call.model.require("embed")
    check_dimensions(call.model, call.wire.output_dimension, param="output_dimension")
    return await openai.answer_embeddings(evolve(call, job=for_purpose(call.job, call.wire.purpose, call.model)))


@frozen(kw_only=True)
class RerankRequest:
    """The body of ``/v1/rerank`` with ``top_k``."""

    query: str
    documents: list[str]
    model: str | None = None
    top_k: TopN | None = None
    return_documents: bool | None = None
    truncation: bool | None = None

    def job(self, network: NetworkConfig) -> ScoreJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        require_few(self.documents, network, param="documents")
        require_top(self.top_k, param="top_k")
        return ScoreJob(
            queries=[self.query],
            documents=self.documents,
            reading=InputParams(truncate_to=None if self.truncation is False else -1),
        )


@frozen(kw_only=True)
class RerankItem:
    """One document's place; the document itself if it was asked for."""

    index: int
    relevance_score: float
    document: str | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class TotalTokens:
    """Tokens read."""

    total_tokens: int


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first."""

    data: list[RerankItem]
    model: str
    usage: TotalTokens
    object: Literal["list"] = "list"


async def answer_rerank(call: Call[RerankRequest, ScoreJob]) -> Answer:
    """Rerank. Raises what ``score`` raises. Cancellation: at once."""
    scores = await score(call.model, call.job, call.timings)
    texts = sum(map(len, call.wire.documents)) if call.wire.return_documents else 0
    return await call.encode(
        partial(_encode, call, scores), rows=len(scores.values), nbytes=scores.values.nbytes + texts
    )


def _encode(call: Call[RerankRequest, ScoreJob], scores: Scores) -> Answer:
    documents = call.wire.documents if call.wire.return_documents else [msgspec.UNSET] * len(scores.values)
    items = [
        RerankItem(index=index, relevance_score=value, document=documents[index])
        for index, value in ranked(scores.values, call.wire.top_k)
    ]
    response = RerankResponse(data=items, model=call.model.name, usage=TotalTokens(total_tokens=scores.prompt_tokens))
    return Answer(msgspec.json.encode(response))


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body that Voyage's clients read, and OpenAI's too: some of these send fields of Voyage's."""
    status, body = openai.error_body(error)
    return status, {"detail": error.message, **body}


VOYAGE = Dialect(
    name="voyage",
    error_body=error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            marks=frozenset({"input_type", "output_dtype", "output_dimension", "truncation"}),
            wire=VoyageEmbeddingsRequest,
            read=VoyageEmbeddingsRequest.job,
            answer=answer_embeddings,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "input_type": "document", "output_dtype": "int8"},
        ),
        Endpoint(
            paths=("/v1/rerank", "/rerank"),
            marks=frozenset({"top_k"}),
            wire=RerankRequest,
            read=RerankRequest.job,
            answer=answer_rerank,
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

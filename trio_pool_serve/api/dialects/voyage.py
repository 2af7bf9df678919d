"""The Voyage dialect: ``/v1/embeddings`` with its fields, ``/v1/rerank`` with ``top_k``, and images."""

from typing import Any, Literal

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.dialects import jina, openai
from trio_pool_serve.api.dialects.vllm import rerank
from trio_pool_serve.api.dialects.vllm.scoring import SCORE_FIELD_NAMES
from trio_pool_serve.api.dialects.voyage_multimodal import MULTIMODAL, OutputDtype, encoding_of
from trio_pool_serve.api.fields.embedding_responses import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.given_fields import refuse_given, the_same, with_truncation
from trio_pool_serve.api.fields.numbers import Dimensions, TopK
from trio_pool_serve.api.fields.ranking import require_top
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames, WireError
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.score import ScoreJob, Scores

EMBEDDINGS_FIELD_NAMES: FieldNames = {
    **openai.EMBEDDINGS_FIELD_NAMES,
    "truncate_to": ("truncate_prompt_tokens", "truncate", "truncation"),
    "dimensions": ("output_dimension", "dimensions"),
}


@frozen(kw_only=True)
class VoyageEmbeddingsRequest(jina.JinaEmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Voyage's fields, alongside those of OpenAI and Jina."""

    TRUNCATE_NAMES = ("truncate", "truncation")
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
        return evolve(job, input_params=with_truncation(job.input_params, self, truncates=self.truncation is not False))


@frozen
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

    def write(scores: Scores, data: list[RerankItem]) -> RerankResponse:
        return RerankResponse(data=data, model=call.model.name, usage=TotalTokens(total_tokens=scores.prompt_tokens))

    top_n, document = call.wire.top_k or call.wire.top_n, str if call.wire.return_documents else None
    return await rerank.respond_ranking(call, write, top_n=top_n, result=RerankItem, document=document)


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
            respond=jina.respond_embeddings,
            field_names=EMBEDDINGS_FIELD_NAMES,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "input_type": "document", "output_dtype": "int8"},
        ),
        Endpoint(
            paths=("/v1/rerank", "/rerank"),
            discriminators=frozenset({"top_k", "truncation"}),
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

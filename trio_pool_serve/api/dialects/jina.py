"""The Jina dialect: ``/v1/embeddings`` with its fields. Its ``/v1/rerank`` is vLLM's."""

from typing import Literal, TypeAlias

from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.openai import EmbeddingsRequest
from trio_pool_serve.api.fields.embedding_responses import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.input_types import with_input_type
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.job import PoolJob

EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]

FIELD_NAMES: FieldNames = {**openai.EMBEDDINGS_FIELD_NAMES, "truncate_to": ("truncate_prompt_tokens", "truncate")}


@frozen(kw_only=True)
class JinaEmbeddingsRequest(EmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Jina's fields, alongside those of OpenAI."""

    task: str | None = None
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    normalized: bool | None = None
    truncate: bool | None = None

    @property
    def given_input_type(self) -> str | None:
        """What the texts are embedded for."""
        return self.task

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        wanted = self.embedding_type[0] if isinstance(self.embedding_type, list) else self.embedding_type
        match wanted:
            case None:
                return super().encoding
            case "float" | "base64":
                return VectorEncoding(wanted, dtype_param="embedding_type")
            case "binary" | "ubinary":
                return VectorEncoding(dtype=wanted, dtype_param="embedding_type")

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        if isinstance(self.embedding_type, list) and len(self.embedding_type) != 1:
            raise InvalidRequestError("embedding_type must name one type.", param="embedding_type")
        job = super().job(network)
        if self.truncate and self.truncate_prompt_tokens is None:
            job = evolve(job, input_params=evolve(job.input_params, truncate_to=-1))
        if self.truncate is False:
            job = evolve(job, input_params=evolve(job.input_params, refuses_longer=True))
        return job if self.normalized is None else evolve(job, normalize=self.normalized)


async def respond_embeddings(call: Call[JinaEmbeddingsRequest, PoolJob]) -> HttpResponse:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    job = with_input_type(call.job, call.wire.given_input_type, call.model)
    return await openai.respond_embeddings(evolve(call, job=job))


JINA = Dialect(
    name="jina",
    error_body=openai.error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            discriminators=frozenset(
                {"task", "embedding_type", "normalized", "truncate", "late_chunking", "late_chunking_params"}
            ),
            wire=JinaEmbeddingsRequest,
            respond=respond_embeddings,
            field_names=FIELD_NAMES,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "task": "retrieval.passage", "normalized": True},
        ),
    ),
)

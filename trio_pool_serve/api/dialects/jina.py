"""The Jina dialect: ``/v1/embeddings`` with its fields. Its ``/v1/rerank`` is the one without marks."""

from typing import Literal, TypeAlias

from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.openai import EmbeddingsRequest
from trio_pool_serve.api.fields.embedding_answers import EmbeddingsResponse, VectorEncoding
from trio_pool_serve.api.fields.purposes import for_purpose
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.job import PoolJob

EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]


@frozen(kw_only=True)
class JinaEmbeddingsRequest(EmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Jina's fields; those of OpenAI hold beside them."""

    task: str | None = None
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    normalized: bool | None = None
    truncate: bool | None = None
    late_chunking: bool | None = None

    @property
    def purpose(self) -> str | None:
        """What the texts are for."""
        return self.task

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are wanted."""
        asked = self.embedding_type[0] if isinstance(self.embedding_type, list) else self.embedding_type
        match asked:
            case None:
                return super().encoding
            case "float" | "base64":
                return VectorEncoding(asked, dtype_param="embedding_type")
            case "binary" | "ubinary":
                return VectorEncoding(dtype=asked, dtype_param="embedding_type")

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        if self.late_chunking:
            raise InvalidRequestError("Late chunking is not supported.", param="late_chunking")
        if isinstance(self.embedding_type, list) and len(self.embedding_type) != 1:
            raise InvalidRequestError("embedding_type must name one type.", param="embedding_type")
        job = super().job(network)
        if self.truncate and self.truncate_prompt_tokens is None:
            job = evolve(job, reading=evolve(job.reading, truncate_to=-1))
        return job if self.normalized is None else evolve(job, normalize=self.normalized)


async def answer_embeddings(call: Call[JinaEmbeddingsRequest, PoolJob]) -> Answer:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    return await openai.answer_embeddings(evolve(call, job=for_purpose(call.job, call.wire.purpose, call.model)))


JINA = Dialect(
    name="jina",
    error_body=openai.error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            marks=frozenset({"task", "embedding_type", "normalized", "truncate", "late_chunking"}),
            wire=JinaEmbeddingsRequest,
            read=JinaEmbeddingsRequest.job,
            answer=answer_embeddings,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "task": "retrieval.passage", "normalized": True},
        ),
    ),
)

"""The Jina dialect: ``/v1/embeddings`` with its fields. Its ``/v1/rerank`` is vLLM's."""

from typing import Any, ClassVar, Literal, TypeAlias

from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.fields.embedding_responses import EmbeddingsResponse
from trio_pool_serve.api.fields.encodings import VectorEncoding
from trio_pool_serve.api.fields.field_values import refuse_given, refused, the_same, with_truncation
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import require_request
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.tasks.pool import PoolJob

EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]

TASKS = (
    *("text-matching", "classification", "clustering", "separation", "embed"),
    *("code.query", "code.passage", "nl2code.query", "nl2code.passage", "code2code.query", "code2code.passage"),
    *("code2nl.query", "code2nl.passage", "code2completion.query", "code2completion.passage"),
    *("qa.query", "qa.passage"),
)
"""Tasks of Jina's models other than the sides of a search; ``embed`` is vLLM's task of this route."""


@frozen(kw_only=True)
class JinaEmbeddingsRequest(openai.EmbeddingsRequest):
    """The body with any of Jina's fields; ``embedding_type`` overrides OpenAI's ``encoding_format``."""

    NORMALIZE_NAMES = ("normalize", "use_activation", "normalized")
    TRUNCATE_NAMES: ClassVar[tuple[str, ...]] = ("truncate",)
    task: str | None = None
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    normalized: bool | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """True is ``END``; the strings are NIM's."""
    return_multivector: bool | None = refused("/pooling with token_embed returns one vector for each token", [False])

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        wanted = self.embedding_type[0] if isinstance(self.embedding_type, list) else self.embedding_type
        match wanted:
            case None:
                return super().encoding
            case "float" | "base64":
                return VectorEncoding(wanted, endianness=self.endianness, dtype_param="embedding_type")
            case "binary" | "ubinary":
                return VectorEncoding(dtype=wanted, dtype_param="embedding_type")

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_request(
            not isinstance(self.embedding_type, list) or len(self.embedding_type) == 1,
            "must be one type, not several.",
            at="embedding_type",
        )
        if self.embedding_type is not None:
            refuse_given(self, ("embed_dtype",), "means the same as embedding_type here: send one of the two")
        if self.encoding_format in ("bytes", "bytes_only"):
            refuse_given(self, ("embedding_type",), "is for JSON, but encoding_format asks for bytes")
        wire = self
        if isinstance(self.truncate, str):
            refuse_given(self, ("truncation_side",), "means the same as truncate here: send one of the two")
            side: TruncationSide = "left" if self.truncate == "START" else "right"
            wire = evolve(self, truncate=self.truncate != "NONE", truncation_side=side)
        job = openai.EmbeddingsRequest.job(wire, max_inputs)
        params = with_truncation(job.input_params, wire, truncates=the_same(wire, *self.TRUNCATE_NAMES))
        return evolve(job, input_params=params)


async def respond_embeddings(call: Call[Any, PoolJob]) -> HttpResponse:
    """Embed, for Voyage's and NIM's clients too: their ``input_type`` means ``task``.

    Errors: as ``pool``. Cancellation: at once.
    """
    param = "task" if getattr(call.wire, "input_type", None) is None else "input_type"
    # A model with adapters for its tasks has no others.
    others = ("embed",) if call.model.task_adapters and call.model.adapter is None else TASKS
    input_type = openai.input_type_of(call) or getattr(call.wire, param)
    job = with_input_type(call.job, input_type, call.model, others=others, param=param)
    return await openai.respond_embeddings(evolve(call, job=job, model_suffix=""))


JINA = Dialect(
    name="jina",
    error_body=openai.error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            model_suffixes=openai.MODEL_SUFFIXES,
            discriminators=frozenset(
                {"task", "embedding_type", "normalized", "truncate", "return_multivector"}
                | {"late_chunking", "late_chunking_params"}
            ),
            wire=JinaEmbeddingsRequest,
            respond=respond_embeddings,
            field_names={**openai.EMBEDDINGS_FIELD_NAMES, "truncate_to": ("truncate_prompt_tokens", "truncate")},
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "task": "retrieval.passage", "normalized": True},
        ),
    ),
)

"""The Voyage dialect: ``/v1/embeddings`` with its fields, ``/v1/rerank`` with ``top_k``, and images."""

from typing import Literal, TypeAlias

from attrs import evolve, frozen

from trio_pool_serve.api.dialects import jina, openai
from trio_pool_serve.api.dialects.vllm import scoring_endpoints
from trio_pool_serve.api.fields.embedding_responses import EmbeddingItem, EmbeddingsResponse, refuse_embeddings
from trio_pool_serve.api.fields.encodings import EncodingFormat, Endianness, VectorEncoding
from trio_pool_serve.api.fields.field_values import (
    Dimensions,
    TopK,
    WireRequest,
    refuse_given,
    require_least,
    require_some,
    the_same,
    with_truncation,
)
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.fields.messages import ContentInput
from trio_pool_serve.api.fields.ranking import RankedItem, respond_ranking
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import ContentPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.types import Vectors

OutputDtype: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]


def encoding_of(form: EncodingFormat | None, output: OutputDtype | None, order: Endianness | None) -> VectorEncoding:
    """Return how vectors are encoded for Voyage's clients."""
    dtype = output if output is not None and output != "float" else "float32"
    return VectorEncoding(form or "float", dtype, order, "output_dtype")


@frozen(kw_only=True)
class VoyageEmbeddingsRequest(jina.JinaEmbeddingsRequest):
    """The body of ``/v1/embeddings`` with any of Voyage's fields, alongside OpenAI's and Jina's."""

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

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        if self.output_dtype is not None:
            refuse_given(
                self, ("embed_dtype", "embedding_type"), "means the same as output_dtype here: send one of the two"
            )
        the_same(self, "input_type", "task")
        job = super().job(max_inputs)
        input_params = job.input_params
        # Only requests with a value in one of Voyage's fields truncate by default, as Voyage does.
        has_value = any(value is not None for value in (self.input_type, self.output_dtype, self.output_dimension))
        if has_value and input_params.truncate_to is None and not input_params.refuses_longer:
            input_params = evolve(input_params, truncate_to=-1)
        return evolve(job, input_params=input_params, dimensions=the_same(self, "output_dimension", "dimensions"))


@frozen(kw_only=True)
class RerankRequest(scoring_endpoints.RerankRequest):
    """The body of ``/v1/rerank`` with ``top_k``, alongside vLLM's fields. The response has no ``request_id``."""

    documents: list[str]  # type: ignore[assignment]
    top_k: TopK | None = None
    truncation: bool | None = None

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_least(self.top_k, least=1, param="top_k")
        the_same(self, "top_k", "top_n")
        job = super().job(max_inputs)
        return evolve(job, input_params=with_truncation(job.input_params, self, truncates=self.truncation is not False))


@frozen(kw_only=True)
class TotalTokens:
    """Number of tokens that the model read."""

    total_tokens: int


@frozen(kw_only=True)
class RerankResponse:
    """The documents, best first."""

    data: list[RankedItem]
    model: str
    usage: TotalTokens
    object: Literal["list"] = "list"


async def respond_rerank(call: Call[RerankRequest, ScoreJob]) -> HttpResponse:
    """Rerank. Errors: as ``score``. Cancellation: at once."""
    return await respond_ranking(
        call,
        lambda scores, data: RerankResponse(
            data=data, model=call.model.name, usage=TotalTokens(total_tokens=scores.prompt_tokens)
        ),
        top_n=call.wire.top_k or call.wire.top_n,
        result=RankedItem,
        document=str if call.wire.return_documents else None,
    )


@frozen(kw_only=True)
class MultimodalRequest(WireRequest):
    """The body of ``/v1/multimodalembeddings``. Voyage's client sends ``encoding_format``."""

    inputs: list[ContentInput]
    input_type: str | None = None
    truncation: bool | None = None
    output_dtype: OutputDtype | None = None
    output_dimension: Dimensions | None = None
    output_encoding: Literal["base64"] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        return encoding_of(self.output_encoding or self.encoding_format, self.output_dtype, None)

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.inputs, max_inputs, param="inputs")
        the_same(self, "output_encoding", "encoding_format")
        refuses = self.truncation is False
        return PoolJob(
            prompts=[content.plain_prompt(max_inputs, f"inputs[{index}]") for index, content in enumerate(self.inputs)],
            input_params=InputParams(truncate_to=None if refuses else -1, refuses_longer=refuses),
            dimensions=self.output_dimension,
        )


@frozen(kw_only=True)
class MultimodalUsage:
    """Numbers of tokens that the model read, in all and for inputs without an image. Pixels are not counted."""

    text_tokens: int
    total_tokens: int
    image_pixels: int = 0


@frozen(kw_only=True)
class MultimodalResponse:
    """A vector for each input."""

    data: list[EmbeddingItem]
    model: str
    usage: MultimodalUsage
    object: Literal["list"] = "list"


async def respond_multimodal(call: Call[MultimodalRequest, PoolJob]) -> HttpResponse:
    """Embed. Errors: as ``pool``. Cancellation: at once."""
    refuse_embeddings(call, call.wire.encoding)
    job = with_input_type(call.job, call.wire.input_type, call.model)
    pooled = await pool(call.model, job, call.context)
    of_prompts = zip(job.prompts, pooled.tokens, strict=True)
    text_tokens = sum(tokens for prompt, tokens in of_prompts if not isinstance(prompt, ContentPrompt))
    vectors: list[Vectors] = [vector for (vector,) in pooled.rows]  # type: ignore[misc]
    return await call.encode(
        lambda: HttpResponse.json(
            MultimodalResponse(
                data=[
                    EmbeddingItem(index=index, embedding=call.wire.encoding.json(vector))
                    for index, vector in enumerate(vectors)
                ],
                model=call.model.name,
                usage=MultimodalUsage(text_tokens=text_tokens, total_tokens=pooled.prompt_tokens),
            )
        ),
        rows=len(vectors),
        nbytes=sum(vector.nbytes for vector in vectors),
    )


VOYAGE = Dialect(
    name="voyage",
    error_body=openai.error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            model_suffixes=openai.MODEL_SUFFIXES,
            discriminators=frozenset({"input_type", "output_dtype", "output_dimension", "truncation"}),
            wire=VoyageEmbeddingsRequest,
            respond=jina.respond_embeddings,
            field_names={
                **openai.EMBEDDINGS_FIELD_NAMES,
                "truncate_to": ("truncate_prompt_tokens", "truncate", "truncation"),
                "dimensions": ("output_dimension", "dimensions"),
            },
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks."], "input_type": "document", "output_dtype": "int8"},
        ),
        Endpoint(
            paths=("/v1/rerank", "/rerank"),
            discriminators=frozenset({"top_k", "truncation"}),
            wire=RerankRequest,
            respond=respond_rerank,
            field_names={
                **scoring_endpoints.RERANK_FIELD_NAMES,
                "truncate_to": ("truncate_prompt_tokens", "truncation"),
            },
            response=RerankResponse,
            summary="Sort documents by how well they fit a query.",
            example={
                "query": "What is a nursery?",
                "documents": ["A nursery owns its tasks.", "Bread needs flour."],
                "top_k": 1,
            },
        ),
        Endpoint(
            paths=("/v1/multimodalembeddings",),
            wire=MultimodalRequest,
            respond=respond_multimodal,
            field_names={"prompts": "inputs", "truncate_to": "truncation", "dimensions": "output_dimension"},
            response=MultimodalResponse,
            summary="Embed inputs of texts and images: one vector each.",
            example={"inputs": [{"content": [{"type": "text", "text": "A nursery owns its tasks."}]}]},
        ),
    ),
)

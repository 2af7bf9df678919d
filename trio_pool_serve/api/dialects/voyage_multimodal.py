"""Voyage's ``/v1/multimodalembeddings``: a vector for texts and images together."""

from typing import Literal, TypeAlias

from attrs import frozen

from trio_pool_serve.api.fields.contents import ContentInput
from trio_pool_serve.api.fields.embedding_responses import EmbeddingItem, EncodingFormat, VectorEncoding
from trio_pool_serve.api.fields.encodings import EmbedDtype, Endianness
from trio_pool_serve.api.fields.given_fields import the_same
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.fields.numbers import Dimensions, require_some
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.prompts import ContentPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import check_dimensions, pool
from trio_pool_serve.types import Vectors

OutputDtype: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]


def encoding_of(form: EncodingFormat | None, output: OutputDtype | None, order: Endianness | None) -> VectorEncoding:
    """Return how vectors are encoded for Voyage's clients."""
    dtype: EmbedDtype = "float32" if output is None or output == "float" else output
    return VectorEncoding(form or "float", dtype, order, "output_dtype")


@frozen(kw_only=True)
class MultimodalRequest:
    """The body of ``/v1/multimodalembeddings``. ``encoding_format`` is what Voyage's client sends."""

    inputs: list[ContentInput]
    model: str | None = None
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

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.inputs, network, param="inputs")
        the_same(self, "output_encoding", "encoding_format")
        refuses = self.truncation is False
        return PoolJob(
            prompts=[content.plain_prompt(network, f"inputs[{index}]") for index, content in enumerate(self.inputs)],
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
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    call.model.require("embed")
    check_dimensions(call.model, call.job.dimensions)
    dimensions = call.job.dimensions or call.model.engine.facts.dimensions
    call.wire.encoding.refuse_unencodable(rows=len(call.job.prompts), dimensions=dimensions)
    job = with_input_type(call.job, call.wire.input_type, call.model)
    pooled = await pool(call.model, job, call.context)
    of_prompts = zip(job.prompts, pooled.tokens, strict=True)
    text_tokens = sum(tokens for prompt, tokens in of_prompts if not isinstance(prompt, ContentPrompt))
    vectors: list[Vectors] = [vector for (vector,) in pooled.rows]  # type: ignore[misc]
    usage = MultimodalUsage(text_tokens=text_tokens, total_tokens=pooled.prompt_tokens)

    def encode() -> HttpResponse:
        items = [EmbeddingItem(index=n, embedding=call.wire.encoding.json(vector)) for n, vector in enumerate(vectors)]
        return HttpResponse.json(MultimodalResponse(data=items, model=call.model.name, usage=usage))

    return await call.encode(encode, rows=len(vectors), nbytes=sum(vector.nbytes for vector in vectors))


MULTIMODAL: Endpoint[MultimodalRequest, PoolJob] = Endpoint(
    paths=("/v1/multimodalembeddings",),
    wire=MultimodalRequest,
    respond=respond_multimodal,
    field_names={"prompts": "inputs", "truncate_to": "truncation", "dimensions": "output_dimension"},
    response=MultimodalResponse,
    summary="Embed inputs of texts and images: one vector each.",
    example={"inputs": [{"content": [{"type": "text", "text": "A nursery owns its tasks."}]}]},
)

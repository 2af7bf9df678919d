"""The OpenAI dialect: ``/v1/embeddings``."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.fields.embedding_responses import (
    EmbeddingsResponse,
    encode_embeddings,
    refuse_embeddings,
    stream_embeddings,
    vectors_of,
)
from trio_pool_serve.api.fields.encodings import EmbedDtype, EncodingFormat, Endianness, VectorEncoding
from trio_pool_serve.api.fields.field_values import Dimensions, refused, require_few, require_given, the_same
from trio_pool_serve.api.fields.input_fields import INPUT_FIELD_NAMES, InputFields, with_input_type
from trio_pool_serve.api.fields.messages import image_prompts
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames, WireError
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError, require_request
from trio_pool_serve.prompts import ChunkedPrompt, Prompt, TextPrompt
from trio_pool_serve.tasks.pool import PoolJob, pool

EMBEDDINGS_FIELD_NAMES: FieldNames = {
    **INPUT_FIELD_NAMES,
    "instruction": "prompt",
    "chunks": ("chunks", "late_chunking"),
}


CharacterOffset: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, le=2**31 - 1, description="A position in the text, in Unicode code points.")
]

Chunk: TypeAlias = tuple[CharacterOffset, CharacterOffset]
"""The first character of a chunk and the one after its last."""


@frozen(kw_only=True)
class EmbeddingsRequest(InputFields):
    """The body of ``/v1/embeddings``: ``input`` or ``messages``. Every optional field may be null.

    ``use_activation`` is vLLM's name of ``normalize``. With ``chunks``, each of these parts of one text gets a vector;
    with ``late_chunking``, each input does, as a part of all inputs joined.
    """

    NORMALIZE_NAMES: ClassVar[tuple[str, ...]] = ("normalize", "use_activation")
    OTHER_TYPES: ClassVar[tuple[str, ...]] = ("application/octet-stream", "text/event-stream")
    """Content types of responses besides JSON."""
    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: Dimensions | None = None
    prompt: str | None = None
    normalize: bool | None = None
    stream: bool | None = None
    late_chunking: bool | None = None
    late_chunking_params: Any = refused(
        "with late_chunking the texts of input are the chunks, without parameters", [{}]
    )
    chunks: list[Chunk] | None = None
    modality: Literal["text", "image"] | None = None
    """Sent by infinity's clients: with ``image`` the inputs are URLs of images."""

    @property
    def encoding(self) -> VectorEncoding:
        """How the vectors are to be encoded."""
        return VectorEncoding(self.encoding_format or "float", self.embed_dtype or "float32", self.endianness)

    def prompts(self, max_inputs: int) -> list[Prompt]:
        """Return the prompts of the field that is given. Raises ``InvalidRequestError``."""
        if self.modality == "image" and isinstance(self.input, str | list):
            return image_prompts(self.input, max_inputs)
        return super().prompts(max_inputs)

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        params = self.input_params
        return PoolJob(
            prompts=self._document_or_prompts(max_inputs),
            input_params=params if self.prompt is None else evolve(params, instruction=self.prompt),
            dimensions=self.dimensions,
            normalize=the_same(self, *self.NORMALIZE_NAMES),
            priority=self.priority or 0,
        )

    def _document_or_prompts(self, max_inputs: int) -> list[Prompt]:
        prompts = self.prompts(max_inputs)
        if self.chunks is not None:
            require_request(not self.late_chunking, "Send `chunks` or `late_chunking`, not both.", param="chunks")
            return [document_with_chunks(prompts, self.chunks, max_inputs)]
        return [document_of_chunks(prompts)] if self.late_chunking else prompts


def document_of_chunks(prompts: Sequence[Prompt]) -> ChunkedPrompt:
    """Return the document whose consecutive chunks are the texts of ``input``, joined without anything between them.

    That is how Jina's API reads ``input`` with ``late_chunking``. Raises ``InvalidRequestError`` for inputs that are
    not texts, and for an empty one.
    """
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    require_request(
        len(texts) == len(prompts),
        "input must be a list of texts with late_chunking: the chunks of one document.",
        param="late_chunking",
    )
    if "" in texts:
        raise EmptyInputError(
            f"input[{texts.index('')}] is empty; with late_chunking, each text is a chunk.", param="input"
        )
    return ChunkedPrompt("".join(texts), tuple(pairwise(accumulate(map(len, texts), initial=0))))


def document_with_chunks(prompts: Sequence[Prompt], chunks: Sequence[Chunk], max_inputs: int) -> ChunkedPrompt:
    """Return the document that is the only text of ``input``, with the chunks that are given by their positions.

    Raises ``InvalidRequestError`` for other inputs, for too many chunks, and for one that is empty or not in the text.
    """
    document = prompts[0]
    if len(prompts) != 1 or not isinstance(document, TextPrompt):
        raise InvalidRequestError("input must be one text with chunks: the document.", param="chunks")
    require_given(chunks, at="chunks")
    require_few(len(chunks), max_inputs, param="chunks", what="chunks")
    for number, (begin, end) in enumerate(chunks):
        if not begin < end <= len(document.text):
            problem = f"the text has {len(document.text)} characters" if begin < end else f"it begins at {begin}"
            raise InvalidRequestError.at(f"chunks[{number}]", f"ends at {end}, but {problem}.")
    return ChunkedPrompt(document.text, tuple(chunks))


def input_type_of(call: Call[Any, PoolJob]) -> str | None:
    """Return the input type that NIM's clients append to the name of the model; ``None`` if they do not."""
    return call.model_suffix.removeprefix("-") or None


async def respond_embeddings(call: Call[Any, PoolJob]) -> HttpResponse:
    """Embed, for all dialects whose requests have the ``encoding`` of ``EmbeddingsRequest``.

    Errors: as ``pool``. Cancellation: at once.
    """
    encoding: VectorEncoding = call.wire.encoding
    if call.model_suffix:
        call = evolve(call, job=with_input_type(call.job, input_type_of(call), call.model))
    refuse_embeddings(call, encoding)
    if call.wire.stream:
        return stream_embeddings(call, encoding)
    pooled = await pool(call.model, call.job, call.context)
    vectors = [vector for row in pooled.rows for vector in vectors_of(row)]
    encode = partial(encode_embeddings, call, vectors, encoding, tokens=pooled.prompt_tokens)
    return await call.encode(encode, rows=len(vectors), nbytes=sum([vector.nbytes for vector in vectors]))


SHORTER = "Please reduce your prompt; or completion length."
"""The sentence by which Elasticsearch recognises an input that is too long; it then sends half of the input."""


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body of an error in OpenAI's form, which vLLM and Jina use, too.

    Voyage's and Xinference's clients, and some of NIM's, read ``detail``.
    """
    message = f"{error.message} {SHORTER}" if isinstance(error.cause, ContextLengthError) else error.message
    described = {"message": message, "type": error.type, "param": error.param, "code": error.status}
    return error.status, {"error": described, "detail": message}


MODEL_SUFFIXES = ("-query", "-passage")
"""NIM's clients may append an input type to the name of a model."""


OPENAI = Dialect(
    name="openai",
    error_body=error_body,
    endpoints=(
        Endpoint(
            paths=("/v1/embeddings", "/embeddings"),
            model_suffixes=MODEL_SUFFIXES,
            wire=EmbeddingsRequest,
            respond=respond_embeddings,
            field_names=EMBEDDINGS_FIELD_NAMES,
            response=EmbeddingsResponse,
            summary="Embed texts: one vector each.",
            example={"input": ["A nursery owns its tasks.", "Every task has a parent."]},
        ),
    ),
)

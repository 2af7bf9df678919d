"""``/v2/embed``, ``/v1/embed``, and ``/v1/classify`` with the model's own labels."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.api.fields.encodings import VectorEncoding, number_items
from trio_pool_serve.api.fields.field_values import Dimensions, Priority, TokenCount, refused, require_few, require_some
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.fields.messages import ContentInput, image_prompts
from trio_pool_serve.api.fields.ranking import Meta, meta_of
from trio_pool_serve.api.http.endpoint import Call, Endpoint, FieldNames
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ImagePart, Prompt, TextPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import Pooled, PoolJob, check_dimensions, pool
from trio_pool_serve.types import Vectors

Truncate: TypeAlias = Literal["NONE", "START", "END"]
"""The end of a text at which it is cut if it is too long."""

OutputDtype: TypeAlias = Literal["int8", "uint8", "binary", "ubinary"]

EmbeddingType: TypeAlias = Literal["float", OutputDtype, "base64"]

ENCODINGS: Mapping[EmbeddingType, VectorEncoding] = {
    "float": VectorEncoding(dtype_param="embedding_types"),
    "base64": VectorEncoding("base64", dtype_param="embedding_types"),
    **{name: VectorEncoding(dtype=name, dtype_param="embedding_types") for name in get_args(OutputDtype)},
}

LIKELY = 0.5
"""If labels do not exclude each other, each one of at least this probability is predicted."""

FIELD_NAMES: FieldNames = {
    "prompts": ("texts", "images", "inputs"),
    "truncate_to": "truncate",
    "dimensions": "output_dimension",
}


def input_params_of(truncate: Truncate | None) -> InputParams:
    """Return how texts are truncated: by default at their ends, as Cohere does it."""
    return InputParams(
        truncate_to=None if truncate == "NONE" else -1,
        refuses_longer=truncate == "NONE",
        truncation_side="left" if truncate == "START" else "right",
    )


@frozen(kw_only=True)
class EmbedRequest:
    """The body of ``/v2/embed``, and of ``/v1/embed``, whose clients send fewer of its fields."""

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[ContentInput] | None = None
    images: list[str] | None = None
    output_dimension: Dimensions | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Truncate | None = None
    max_tokens: TokenCount | None = None
    priority: Priority | None = None

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {self.max_tokens}.", param="max_tokens")
        return PoolJob(
            prompts=self._prompts(network),
            input_params=input_params_of(self.truncate),
            dimensions=self.output_dimension,
            priority=self.priority or 0,
        )

    def _prompts(self, network: NetworkConfig) -> list[Prompt]:
        given: Mapping[str, Sequence[object] | None] = {
            "texts": self.texts,
            "images": self.images,
            "inputs": self.inputs,
        }
        present = [name for name, inputs in given.items() if inputs]
        if len(present) > 1:
            raise InvalidRequestError(f"{' and '.join(present)} exclude each other.", param=present[-1])
        if not present:
            named = [name for name, inputs in given.items() if inputs is not None]
            param = named[-1] if named else "texts"
            raise EmptyInputError(f"There is nothing to embed: {param} is empty.", param=param)
        if self.input_type == "image" and self.texts:
            raise InvalidRequestError("Images are given as images or inputs, not as texts.", param="input_type")
        require_few(len(given[present[0]] or ()), network, param=present[0])
        if self.images:
            return image_prompts(self.images, network, param="images")
        return [TextPrompt(text) for text in self.texts or ()] or [
            content.plain_prompt(network, f"inputs[{index}]") for index, content in enumerate(self.inputs or ())
        ]


@frozen(kw_only=True)
class EmbedResponse:
    """The vectors in each of the requested types; ``texts`` are the inputs without an image.

    To requests without ``embedding_types``, ``/v1/embed`` responds with the vectors themselves, as ``float``.
    """

    id: str
    embeddings: dict[str, list[msgspec.Raw]] | list[msgspec.Raw]
    texts: list[str]
    meta: Meta
    response_type: Literal["embeddings_by_type", "embeddings_floats"] = "embeddings_by_type"


async def respond_embed(call: Call[EmbedRequest, PoolJob], *, version: str) -> HttpResponse:
    """Embed. Raises what ``pool`` raises. Cancellation: at once."""
    call.model.require("embed")
    check_dimensions(call.model, call.wire.output_dimension)
    dimensions = call.wire.output_dimension or call.model.engine.facts.dimensions
    types: Sequence[EmbeddingType] = list(dict.fromkeys(call.wire.embedding_types or ())) or ["float"]
    for name in types:
        ENCODINGS[name].refuse_unencodable(rows=len(call.job.prompts), dimensions=dimensions)
    pooled, image_tokens = await _pool(call)
    vectors: list[Vectors] = [vector for (vector,) in pooled.rows]  # type: ignore[misc]
    images = sum(map(_images, call.job.prompts))
    meta = meta_of(
        version,
        input_tokens=pooled.prompt_tokens - image_tokens,
        image_tokens=image_tokens,
        **({"images": images} if images else {}),
    )
    texts = [prompt.text for prompt in call.job.prompts if isinstance(prompt, TextPrompt)]

    def encode() -> HttpResponse:
        by_type = {str(name): [ENCODINGS[name].json(vector) for vector in vectors] for name in types}
        response = EmbedResponse(id=call.request_id, embeddings=by_type, texts=texts, meta=meta)
        if version == "1" and not call.wire.embedding_types:
            response = evolve(response, embeddings=by_type["float"], response_type="embeddings_floats")
        return HttpResponse.json(response)

    return await call.encode(
        encode, rows=len(vectors) * len(types), nbytes=sum(vector.nbytes for vector in vectors) * len(types)
    )


async def _pool(call: Call[EmbedRequest, PoolJob]) -> tuple[Pooled, int]:
    """Embed, and return how many of the tokens belong to inputs with images.

    At most ``max_tokens`` of each text are embedded; if texts must not be truncated, longer ones are refused.
    """
    job = with_input_type(call.job, call.wire.input_type, call.model, others=("classification", "clustering", "image"))
    limit = call.wire.max_tokens
    if limit is not None and job.input_params.truncate_to is not None:
        keep = min(limit, call.model.renderer.max_model_len)
        job = evolve(job, input_params=evolve(job.input_params, truncate_to=keep))
        limit = None
    pooled = await pool(call.model, job, call.context)
    for index, tokens in enumerate(pooled.tokens):
        if limit is not None and tokens > limit:
            raise ContextLengthError(f"Text {index} has {tokens} tokens, more than max_tokens, {limit}.")
    return pooled, sum(tokens for prompt, tokens in zip(job.prompts, pooled.tokens, strict=True) if _images(prompt))


def _images(prompt: Prompt) -> int:
    return sum(isinstance(part, ImagePart) for part in getattr(prompt, "parts", ()))


@frozen(kw_only=True)
class ClassifyRequest:
    """The body of ``/v1/classify``."""

    inputs: list[str]
    model: str | None = None
    examples: list[Any] | None = refused("the labels are the model's own", [[]])
    preset: str | None = refused("the labels are the model's own", [""])
    truncate: Truncate | None = None
    priority: Priority | None = None

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.inputs, network, param="inputs")
        return PoolJob(
            prompts=[TextPrompt(text) for text in self.inputs],
            tasks=("classify",),
            input_params=input_params_of(self.truncate),
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class LabelConfidence:
    """The probability of a label."""

    confidence: msgspec.Raw


@frozen(kw_only=True)
class Classification:
    """The labels of a text.

    ``predictions`` and ``confidences`` contain the most probable label, like ``prediction`` and ``confidence``. If
    labels do not exclude each other, they contain all labels that are ``LIKELY``, and there is no single one.
    """

    id: str
    input: str
    prediction: str | None
    predictions: list[str]
    confidence: msgspec.Raw | None
    confidences: list[msgspec.Raw]
    labels: dict[str, LabelConfidence]
    classification_type: Literal["single-label", "multi-label"]


@frozen(kw_only=True)
class ClassifyResponse:
    """A classification per input, in order."""

    id: str
    classifications: list[Classification]
    meta: Meta


async def respond_classify(call: Call[ClassifyRequest, PoolJob]) -> HttpResponse:
    """Classify. Raises what ``pool`` raises. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.context)
    labels = len(call.model.folder.spec.labels)
    return await call.encode(
        partial(_encode, call, pooled), rows=len(pooled.rows) * labels, nbytes=4 * len(pooled.rows) * labels
    )


def _encode(call: Call[ClassifyRequest, PoolJob], pooled: Pooled) -> HttpResponse:
    spec = call.model.folder.spec
    classifications = [
        _classification(f"{call.request_id}-{index}", text, values, spec.labels, exclusive=not spec.multi_label)  # type: ignore[arg-type]
        for index, (text, (values,)) in enumerate(zip(call.wire.inputs, pooled.rows, strict=True))
    ]
    meta = meta_of("1", classifications=len(classifications))
    return HttpResponse.json(ClassifyResponse(id=call.request_id, classifications=classifications, meta=meta))


def _classification(
    item_id: str, text: str, values: Vectors, labels: tuple[str, ...], *, exclusive: bool
) -> Classification:
    confidences = list(map(msgspec.Raw, number_items(values)))
    best = int(values.argmax())
    predicted = [best] if exclusive else np.flatnonzero(values >= LIKELY).tolist()
    return Classification(
        id=item_id,
        input=text,
        prediction=labels[best] if exclusive else None,
        predictions=[labels[index] for index in predicted],
        confidence=confidences[best] if exclusive else None,
        confidences=[confidences[index] for index in predicted],
        labels={
            label: LabelConfidence(confidence=confidence) for label, confidence in zip(labels, confidences, strict=True)
        },
        classification_type="single-label" if exclusive else "multi-label",
    )


POOLING_ENDPOINTS: tuple[Endpoint[Any, PoolJob], ...] = (
    Endpoint(
        paths=("/v2/embed",),
        wire=EmbedRequest,
        respond=partial(respond_embed, version="2"),
        field_names=FIELD_NAMES,
        response=EmbedResponse,
        summary="Embed texts: one vector each, in every requested type.",
        example={
            "texts": ["A nursery owns its tasks.", "Every task has a parent."],
            "input_type": "search_document",
            "embedding_types": ["float", "int8"],
        },
    ),
    Endpoint(
        paths=("/v1/embed",),
        wire=EmbedRequest,
        respond=partial(respond_embed, version="1"),
        field_names=FIELD_NAMES,
        response=EmbedResponse,
        summary="Embed texts: one vector each.",
        example={"texts": ["A nursery owns its tasks.", "Every task has a parent."]},
    ),
    Endpoint(
        paths=("/v1/classify",),
        discriminators=frozenset({"inputs"}),
        wire=ClassifyRequest,
        respond=respond_classify,
        field_names={"prompts": "inputs", "truncate_to": "truncate"},
        response=ClassifyResponse,
        summary="Classify texts by the model's own labels.",
        example={"inputs": ["A nursery owns its tasks."]},
    ),
)

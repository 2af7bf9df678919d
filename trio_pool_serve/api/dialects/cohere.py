"""The Cohere dialect: versions 1 and 2 of its API, without the paths of version 1 that are vLLM's too."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.vllm.scoring_endpoints import RERANK_FIELD_NAMES, RerankOptions
from trio_pool_serve.api.dialects.vllm.token_endpoints import DetokenizeRequest, respond_detokenize
from trio_pool_serve.api.fields.embedding_responses import pool_limited, refuse_embeddings
from trio_pool_serve.api.fields.encodings import VectorEncoding, number_items
from trio_pool_serve.api.fields.field_values import (
    Dimensions,
    Priority,
    TokenCount,
    WireRequest,
    refused,
    require_few,
    require_least,
    require_some,
)
from trio_pool_serve.api.fields.input_fields import with_input_type
from trio_pool_serve.api.fields.messages import ContentInput, image_prompts
from trio_pool_serve.api.fields.ranking import (
    Meta,
    RankedDocuments,
    RerankDocument,
    meta_of,
    respond_results,
)
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, FieldNames, WireError
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, MissingFieldError, listed, require_request
from trio_pool_serve.prompts import ImagePart, Prompt, TextPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.tasks.tokenize import tokenize
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
"""Least probability of a predicted label, if labels do not exclude each other."""

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
class EmbedRequest(WireRequest):
    """The body of ``/v2/embed``, and of ``/v1/embed``, whose clients send fewer of its fields."""

    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[ContentInput] | None = None
    images: list[str] | None = None
    output_dimension: Dimensions | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Truncate | None = None
    max_tokens: TokenCount | None = None
    priority: Priority | None = None

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_least(self.max_tokens, least=1, param="max_tokens")
        return PoolJob(
            prompts=self._prompts(max_inputs),
            input_params=input_params_of(self.truncate),
            dimensions=self.output_dimension,
            priority=self.priority or 0,
        )

    def _prompts(self, max_inputs: int) -> list[Prompt]:
        given: dict[str, Sequence[object] | None] = {"texts": self.texts, "images": self.images, "inputs": self.inputs}
        present = [name for name, inputs in given.items() if inputs]
        if len(present) > 1:
            raise InvalidRequestError(
                f"Send only one of {listed([f'`{name}`' for name in present], 'and')}.", param=present[-1]
            )
        if not present:
            param = next((name for name in reversed(given) if given[name] is not None), None)
            raise MissingFieldError(*given) if param is None else EmptyInputError.at(param, "is empty.")
        require_request(
            self.input_type != "image" or not self.texts,
            "Send images in `images` or `inputs`: input_type is 'image', but texts has texts.",
            param="input_type",
        )
        require_few(len(given[present[0]] or ()), max_inputs, param=present[0])
        if self.images:
            return image_prompts(self.images, max_inputs, param="images")
        return [TextPrompt(text) for text in self.texts or ()] or [
            content.plain_prompt(max_inputs, f"inputs[{index}]") for index, content in enumerate(self.inputs or ())
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
    """Embed. Errors: as ``pool``. Cancellation: at once."""
    types: Sequence[EmbeddingType] = list(dict.fromkeys(call.wire.embedding_types or ["float"]))
    refuse_embeddings(call, *map(ENCODINGS.__getitem__, types))
    job = with_input_type(call.job, call.wire.input_type, call.model, others=("classification", "clustering", "image"))
    pooled = await pool_limited(call, job, call.wire.max_tokens, name="max_tokens")
    vectors: list[Vectors] = [vector for (vector,) in pooled.rows]  # type: ignore[misc]
    parts = [getattr(prompt, "parts", ()) for prompt in call.job.prompts]
    images = sum(isinstance(part, ImagePart) for part in chain(*parts))
    image_tokens = sum(compress(pooled.tokens, parts))  # an input without an image is a text, without parts
    meta = meta_of(
        version,
        input_tokens=pooled.prompt_tokens - image_tokens,
        image_tokens=image_tokens,
        **({"images": images} if images else {}),
    )

    def encode() -> HttpResponse:
        by_type = {str(name): [ENCODINGS[name].json(vector) for vector in vectors] for name in types}
        texts = [prompt.text for prompt in call.job.prompts if isinstance(prompt, TextPrompt)]
        response = EmbedResponse(id=call.request_id, embeddings=by_type, texts=texts, meta=meta)
        if version == "1" and not call.wire.embedding_types:
            response = evolve(response, embeddings=by_type["float"], response_type="embeddings_floats")
        return HttpResponse.json(response)

    return await call.encode(
        encode, rows=len(vectors) * len(types), nbytes=sum(vector.nbytes for vector in vectors) * len(types)
    )


@frozen(kw_only=True)
class ClassifyRequest(WireRequest):
    """The body of ``/v1/classify``."""

    inputs: list[str]
    examples: list[Any] | None = refused("the labels are the model's own", [[]])
    preset: str | None = refused("the labels are the model's own", [""])
    truncate: Truncate | None = None
    priority: Priority | None = None

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.inputs, max_inputs, param="inputs")
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
    """Classify. Errors: as ``pool``. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.context)
    spec = call.model.folder.spec

    def classification(index: int, values: Vectors) -> Classification:
        confidences = list(map(msgspec.Raw, number_items(values)))
        best = int(values.argmax())
        predicted = np.flatnonzero(values >= LIKELY).tolist() if spec.multi_label else [best]
        return Classification(
            id=f"{call.request_id}-{index}",
            input=call.wire.inputs[index],
            prediction=None if spec.multi_label else spec.labels[best],
            predictions=[spec.labels[label] for label in predicted],
            confidence=None if spec.multi_label else confidences[best],
            confidences=[confidences[label] for label in predicted],
            labels={
                label: LabelConfidence(confidence=confidence)
                for label, confidence in zip(spec.labels, confidences, strict=True)
            },
            classification_type="multi-label" if spec.multi_label else "single-label",
        )

    def encode() -> HttpResponse:
        classifications = [classification(index, values) for index, (values,) in enumerate(pooled.rows)]  # type: ignore[arg-type]
        meta = meta_of("1", classifications=len(classifications))
        return HttpResponse.json(ClassifyResponse(id=call.request_id, classifications=classifications, meta=meta))

    numbers = len(pooled.rows) * len(spec.labels)
    return await call.encode(encode, rows=numbers, nbytes=4 * numbers)


@frozen(kw_only=True)
class RerankRequest(RerankOptions):
    """The body of ``/v2/rerank``, which clients of vLLM send its options too.

    Documents that are too long are truncated, as Cohere does it. ``return_documents`` is a field of version 1.
    """

    query: str
    documents: str | RerankDocument | list[str | RerankDocument]

    def job(self, max_inputs: int) -> ScoreJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        require_few(len(given), max_inputs, param="documents")
        require_least(self.top_n)
        documents = [document if isinstance(document, str) else document.text for document in given]
        return self.score_job([self.query], documents, truncate_to=-1)


@frozen(kw_only=True)
class TokenizeRequest(WireRequest):
    """The body of ``/v1/tokenize``."""

    text: str


@frozen(kw_only=True)
class TokenizeResponse:
    """A text's tokens, without special ones."""

    tokens: list[int]
    token_strings: list[str]
    meta: Meta


@frozen(kw_only=True)
class DetokenizeResponse:
    """The text of token ids."""

    text: str
    meta: Meta


async def respond_tokenize(call: Call[TokenizeRequest, str]) -> HttpResponse:
    """Tokenize. Errors: as ``tokenize``. Cancellation: at once."""
    (tokens,) = await tokenize(call.model, [call.job], call.context, add_special_tokens=False)
    return await call.encode(
        lambda: HttpResponse.json(
            TokenizeResponse(
                tokens=[token.id for token in tokens], token_strings=[token.text for token in tokens], meta=meta_of("1")
            )
        ),
        rows=1,
        nbytes=8 * len(tokens),
    )


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body of an error: Cohere's own has only the message, ``error`` is for clients that come from vLLM."""
    status, body = openai.error_body(error)
    described = {**body["error"], "message": error.message}
    return status, {"id": error.request_id, "message": error.message, "error": described}


TEXT, OTHER_TEXT = "A nursery owns its tasks.", "Every task has a parent."
"""Examples."""

COHERE = Dialect(
    name="cohere",
    error_body=error_body,
    endpoints=(
        Endpoint(
            paths=("/v2/embed",),
            wire=EmbedRequest,
            respond=partial(respond_embed, version="2"),
            field_names=FIELD_NAMES,
            response=EmbedResponse,
            summary="Embed texts: one vector each, in every requested type.",
            example={
                "texts": [TEXT, OTHER_TEXT],
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
            example={"texts": [TEXT, OTHER_TEXT]},
        ),
        Endpoint(
            paths=("/v1/classify",),
            discriminators=frozenset({"inputs"}),
            wire=ClassifyRequest,
            respond=respond_classify,
            field_names={"prompts": "inputs", "truncate_to": "truncate"},
            response=ClassifyResponse,
            summary="Classify texts by the model's own labels.",
            example={"inputs": [TEXT]},
        ),
        Endpoint(
            paths=("/v2/rerank",),
            wire=RerankRequest,
            respond=partial(respond_results, response=RankedDocuments, version="2"),
            field_names=RERANK_FIELD_NAMES,
            response=RankedDocuments,
            summary="Sort documents by how well they fit a query.",
            example={"query": "What is a nursery?", "documents": [TEXT, "Bread needs flour."], "top_n": 1},
        ),
        Endpoint(
            paths=("/v1/tokenize",),
            discriminators=frozenset({"text"}),
            wire=TokenizeRequest,
            to_job=lambda wire, _: wire.text,
            respond=respond_tokenize,
            field_names={"prompts": "text"},
            response=TokenizeResponse,
            summary="Tokenize a text.",
            example={"text": TEXT},
        ),
        Endpoint(
            paths=("/v1/detokenize",),
            discriminators=frozenset({"tokens"}),
            wire=DetokenizeRequest,
            respond=partial(respond_detokenize, response=lambda text: DetokenizeResponse(text=text, meta=meta_of("1"))),
            field_names={"token_ids": "tokens"},
            response=DetokenizeResponse,
            summary="Turn tokens back into text.",
            example={"tokens": [5, 6, 7]},
        ),
    ),
)

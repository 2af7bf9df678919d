"""``/embed``, ``/embed_all``, ``/embed_sparse`` and ``/predict``; and the options and headers of all endpoints.

Every optional field may be null. Responses are bare lists, with token counts and timings in headers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from attrs import evolve, frozen

from trio_pool_serve.api.fields.encodings import VectorEncoding, array_json, nbytes_of, number_items
from trio_pool_serve.api.fields.field_values import (
    Dimensions,
    MaxActiveDims,
    TokenPoolingFactor,
    WireRequest,
    refused,
    require_few,
)
from trio_pool_serve.api.fields.input_fields import Input, prompts_of
from trio_pool_serve.api.fields.ranking import ranked
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, require_request
from trio_pool_serve.prompts import PairPrompt, Prompt, TextPrompt, TruncationSide
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.types import PooledValue, PoolingTask, SparseVector

TEXTS = ["A nursery owns its tasks.", "Every task has a parent."]
"""Examples."""

NOT_DENSE = "sparse vectors are neither truncated nor normalised"


@frozen(kw_only=True)
class TextOptions:
    """Fields about truncation and prompts, which most requests have."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None

    def input_params(self) -> InputParams:
        """Return the input params of the job. Raises ``InvalidRequestError``."""
        return InputParams(
            truncate_to=-1 if self.truncate else None,
            refuses_longer=self.truncate is False,
            dialect_truncates=True,
            truncation_side=_side(self.truncation_direction),
            prompt_name=self.prompt_name,
        )


def _side(direction: str | None) -> TruncationSide:
    # Documented as Right and Left; clients send both in lower case too.
    match (direction or "right").lower():
        case "right" | "left" as side:
            return side
    raise InvalidRequestError.at("truncation_direction", f"must be 'Right' or 'Left', not {direction!r}.")


@frozen(kw_only=True)
class EmbedRequest(WireRequest, TextOptions):
    """The body of ``/embed``."""

    inputs: Input
    normalize: bool | None = None
    dimensions: Dimensions | None = None

    def job(self, max_inputs: int, task: PoolingTask = "embed") -> PoolJob:
        """Return the job of a task. Raises ``InvalidRequestError``.

        Vectors of texts have unit length unless ``normalize`` is false; by default, vectors of tokens have the model's
        own length.
        """
        return PoolJob(
            prompts=none_empty(prompts_of(self.inputs, max_inputs, param="inputs")),
            tasks=(task,),
            input_params=self.input_params(),
            dimensions=self.dimensions,
            normalize=self.normalize is not False if task == "embed" else self.normalize,
        )


@frozen(kw_only=True)
class EmbedAllRequest(EmbedRequest):
    """The body of ``/embed_all``. ``token_pooling`` is of this server."""

    token_pooling: TokenPoolingFactor | None = None

    def job(self, max_inputs: int, task: PoolingTask = "token_embed") -> PoolJob:
        """Return the job, as the base class."""
        return evolve(super().job(max_inputs, task), token_pooling=self.token_pooling)


@frozen(kw_only=True)
class EmbedSparseRequest(EmbedRequest):
    """The body of ``/embed_sparse``. ``max_active_dims`` is of this server."""

    normalize: bool | None = refused(NOT_DENSE, [False])
    dimensions: Dimensions | None = refused(NOT_DENSE)
    max_active_dims: MaxActiveDims | None = None

    def job(self, max_inputs: int, task: PoolingTask = "sparse_embed") -> PoolJob:
        """Return the job, as the base class."""
        return evolve(super().job(max_inputs, task), max_active_dims=self.max_active_dims)


@frozen(kw_only=True)
class PredictRequest(WireRequest, TextOptions):
    """The body of ``/predict``. A list of texts is one text, or one pair; a list of lists is several of them."""

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        kinds = set() if isinstance(self.inputs, str) else set(map(type, self.inputs))
        require_request(len(kinds) <= 1, "mixes texts and lists; send one or the other.", at="inputs")
        sequences: Sequence[object] = self.inputs if kinds == {list} else [self.inputs]
        require_few(len(sequences), max_inputs, param="inputs")
        return PoolJob(
            prompts=none_empty(list(map(_sequence, sequences))),
            tasks=("classify",),
            input_params=self.input_params(),
            activation="raw" if self.raw_scores else "probabilities",
        )


def none_empty(prompts: list[Prompt]) -> list[Prompt]:
    """Return prompts that have text or tokens. Raises ``EmptyInputError``: these clients find empty documents by it."""
    for index, prompt in enumerate(prompts or [TextPrompt("")]):
        if prompt == TextPrompt("") or prompt == PairPrompt("", ""):
            place = f": inputs[{index}] is empty" if len(prompts) > 1 else ""
            raise EmptyInputError(f"`inputs` cannot be empty{place}", param="inputs")
    return prompts


def _sequence(sequence: object) -> Prompt:
    match sequence:
        case str(text) | [str(text)]:
            return TextPrompt(text)
        case [str(first), str(second)]:
            return PairPrompt(first, second)
        case []:
            raise EmptyInputError.at("inputs", "is empty.")
    raise InvalidRequestError.at("inputs", "must be a text, or lists of one text or two, a pair.")


async def respond_vectors(call: Call[Any, PoolJob]) -> HttpResponse:
    """Respond to ``/embed``, ``/embed_all`` and ``/embed_sparse``: the value of the job's one task for each input.

    Errors: as ``pool``. Cancellation: at once.
    """
    pooled = await pool(call.model, call.job, call.context)
    values = [value for (value,) in pooled.rows]
    return await respond_timed(
        call,
        lambda: HttpResponse.json(list(map(VectorEncoding().json, values))),
        rows=sum(1 if isinstance(value, SparseVector) or value.ndim == 1 else len(value) for value in values),
        nbytes=sum(map(nbytes_of, values)),
        tokens=pooled.prompt_tokens,
        characters=_characters(call.job.prompts),
    )


async def respond_predict(call: Call[Any, PoolJob], *, top_k: int | None = None, in_list: bool = False) -> HttpResponse:
    """Respond to ``/predict``: the ``top_k`` labels of each input, best first.

    Labels of several inputs are in a list, labels of a text alone only if ``in_list``. Errors: as ``pool``.
    Cancellation: at once.
    """
    pooled = await pool(call.model, call.job, call.context)
    inputs = call.wire.inputs

    def encode() -> HttpResponse:
        rows = [_predictions(value, call.model, top_k) for (value,) in pooled.rows]
        is_list = in_list if isinstance(inputs, str) else isinstance(inputs[0], list)
        return HttpResponse(array_json(rows) if is_list else rows[0])

    nbytes = sum(nbytes_of(value) for (value,) in pooled.rows)
    return await respond_timed(
        call,
        encode,
        rows=nbytes // 4,  # each number is an object
        nbytes=nbytes,
        tokens=pooled.prompt_tokens,
        characters=_characters(call.job.prompts),
    )


def _predictions(value: PooledValue, model: Model, top_k: int | None) -> bytes:
    """Return the best ``top_k`` labels, best first."""
    assert not isinstance(value, SparseVector)  # noqa: S101
    numbers = number_items(value)
    return msgspec.json.encode(
        [{"score": msgspec.Raw(numbers[at]), "label": model.label(at)} for at, _ in ranked(value, top_k)]
    )


def _characters(prompts: Sequence[Prompt]) -> int | None:
    """Count the characters of texts; ``None`` if there are token ids."""
    counts = [
        len(prompt.text) if isinstance(prompt, TextPrompt) else len(prompt.first) + len(prompt.second)
        for prompt in prompts
        if isinstance(prompt, TextPrompt | PairPrompt)
    ]
    return sum(counts) if len(counts) == len(prompts) else None


async def respond_timed(
    call: Call[Any, Any],
    encode: Callable[[], HttpResponse],
    *,
    rows: int,
    nbytes: int,
    tokens: int,
    characters: int | None,
) -> HttpResponse:
    """Encode a response as ``Call.encode``, and add TEI's headers: tokens, characters, and times in milliseconds.

    Cancellation: as ``Call.encode``.
    """
    response = await call.encode(encode, rows=rows, nbytes=nbytes)
    timings = call.context.timings
    milliseconds = {
        "x-compute-time": timings.total_s,
        "x-total-time": timings.total_s,
        "x-tokenization-time": timings.render_s,
        "x-queue-time": timings.queue_s,
        "x-inference-time": timings.forward_s + timings.copy_s,
    }
    headers = {"x-compute-tokens": str(tokens)}
    if characters is not None:
        headers["x-compute-characters"] = str(characters)
    return response.with_headers(headers | {name: str(round(seconds * 1e3)) for name, seconds in milliseconds.items()})


_endpoint = partial(
    Endpoint[Any, Any], field_names={"prompts": "inputs", "truncate_to": "truncate"}, example={"inputs": TEXTS}
)

POOLING_ENDPOINTS = (
    _endpoint(
        paths=("/embed",),
        wire=EmbedRequest,
        respond=respond_vectors,
        summary="Embed texts: one vector each.",
    ),
    _endpoint(
        paths=("/embed_all",),
        wire=EmbedAllRequest,
        respond=respond_vectors,
        summary="Embed texts: one vector for each of their tokens.",
    ),
    _endpoint(
        paths=("/embed_sparse",),
        wire=EmbedSparseRequest,
        respond=respond_vectors,
        summary="Embed texts: weights over the vocabulary.",
    ),
    _endpoint(
        paths=("/predict",),
        wire=PredictRequest,
        respond=respond_predict,
        summary="Classify texts, or pairs of texts: their labels, best first.",
        example={"inputs": [[text] for text in TEXTS]},
    ),
)

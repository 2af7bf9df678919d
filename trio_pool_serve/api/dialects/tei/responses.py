"""Responses of text-embeddings-inference: bare lists, with token counts and timings in headers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.api.dialects.tei.requests import DecodeRequest, PredictJob, TokenizeRequest
from trio_pool_serve.api.fields.embedding_responses import VectorEncoding
from trio_pool_serve.api.fields.encodings import array_json, nbytes_of, number_items, row_json
from trio_pool_serve.api.fields.ranking import ranked
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.prompts import PairPrompt, Prompt, TextPrompt, text_of
from trio_pool_serve.rendering.text.tokenizer import Token
from trio_pool_serve.tasks.input_params import InputParams, rendering_params
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import PooledRow, pool
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.tasks.tokenize import detokenize, tokenize
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import PooledValue, SparseVector


@frozen
class Prediction:
    """One label of a response of ``/predict``."""

    score: msgspec.Raw
    label: str


@frozen
class Rank:
    """One text of a response of ``/rerank``."""

    index: int
    score: msgspec.Raw
    text: str | msgspec.UnsetType = msgspec.UNSET


@frozen
class SimpleToken:
    """One token of a response of ``/tokenize``; ``start`` and ``stop`` count bytes of UTF-8."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def _predictions(value: PooledValue, model: Model, top_k: int | None) -> bytes:
    """Return the best ``top_k`` labels, best first."""
    assert not isinstance(value, SparseVector)  # noqa: S101
    numbers = number_items(value)
    best = ranked(value, top_k)
    return msgspec.json.encode([Prediction(msgspec.Raw(numbers[at]), model.label(at)) for at, _ in best])


async def respond_vectors(call: Call[Any, PoolJob]) -> HttpResponse:
    """Respond to ``/embed``, ``/embed_all`` and ``/embed_sparse``: the value of the job's one task for each input.

    Raises what ``pool`` raises. Cancellation: at once.
    """
    pooled = await pool(call.model, call.job, call.context)
    encoding = VectorEncoding()
    response = await call.encode(
        lambda: HttpResponse.json([encoding.json(value) for (value,) in pooled.rows]),
        rows=sum(map(_written_rows, pooled.rows)),
        nbytes=sum(nbytes_of(value) for (value,) in pooled.rows),
    )
    return _timed(response, call.context.timings, pooled.prompt_tokens, _characters(call.job.prompts))


async def respond_predict(call: Call[Any, PredictJob]) -> HttpResponse:
    """Respond to ``/predict``: the labels of each input, best first.

    Raises what ``pool`` raises. Cancellation: at once.
    """
    job = call.job.pooling
    pooled = await pool(call.model, job, call.context)

    def encode() -> HttpResponse:
        rows = [_predictions(value, call.model, call.job.top_k) for (value,) in pooled.rows]
        return HttpResponse(array_json(rows) if call.job.is_batch else rows[0])

    nbytes = sum(nbytes_of(value) for (value,) in pooled.rows)
    response = await call.encode(encode, rows=nbytes // 4, nbytes=nbytes)  # each number is an object
    return _timed(response, call.context.timings, pooled.prompt_tokens, _characters(job.prompts))


async def respond_rerank(call: Call[Any, ScoreJob]) -> HttpResponse:
    """Respond to ``/rerank``: the texts' indices and scores, best first.

    Raises what ``score`` raises. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.context)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_text else None

    def encode() -> HttpResponse:
        numbers = number_items(scores.values)
        return HttpResponse.json(
            [
                Rank(index, msgspec.Raw(numbers[index]), texts[index] if texts else msgspec.UNSET)
                for index, _ in ranked(scores.values, call.wire.top_n)
            ]
        )

    nbytes = sum(map(len, texts)) if texts is not None else scores.values.nbytes
    response = await call.encode(encode, rows=len(scores.values), nbytes=nbytes)
    return _timed(response, call.context.timings, scores.prompt_tokens, _job_characters(call.job, in_pairs=True))


async def respond_similarity(call: Call[Any, ScoreJob]) -> HttpResponse:
    """Respond to ``/similarity``: a number per sentence, in order.

    Raises what ``score`` raises. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.context)
    response = await call.encode(
        lambda: HttpResponse(row_json(scores.values, "float32")), rows=1, nbytes=scores.values.nbytes
    )
    return _timed(response, call.context.timings, scores.prompt_tokens, _job_characters(call.job, in_pairs=False))


async def respond_tokenize(call: Call[TokenizeRequest, list[str]]) -> HttpResponse:
    """Respond to ``/tokenize``: the tokens of each text.

    Raises what ``tokenize`` raises. Cancellation: as ``tokenize``.
    """
    instruction = rendering_params(call.model, InputParams(prompt_name=call.wire.prompt_name)).instruction
    special = call.wire.add_special_tokens is not False
    tokens = await tokenize(call.model, call.job, call.context, add_special_tokens=special, instruction=instruction)

    def encode() -> HttpResponse:
        each = zip(call.job, tokens, strict=True)
        return HttpResponse(
            array_json([msgspec.json.encode(_simple_tokens(instruction + text, of)) for text, of in each])
        )

    count, characters = sum(map(len, tokens)), sum(map(len, call.job))
    response = await call.encode(encode, rows=count, nbytes=characters)
    return _timed(response, call.context.timings, count, characters)


def _simple_tokens(text: str, tokens: Sequence[Token]) -> list[SimpleToken]:
    at = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        SimpleToken(
            token.id,
            token.text,
            token.special,
            None if token.start is None else at[token.start],
            None if token.stop is None else at[token.stop],
        )
        for token in tokens
    ]


async def respond_decode(call: Call[DecodeRequest, list[npt.NDArray[np.int64]]]) -> HttpResponse:
    """Respond to ``/decode``: the text of each list of ids.

    Raises what ``detokenize`` raises. Cancellation: as ``detokenize``.
    """
    skips = call.wire.skip_special_tokens is not False
    texts = await detokenize(call.model, call.job, call.context, skip_special_tokens=skips)
    characters = sum(map(len, texts))
    response = await call.encode(lambda: HttpResponse.json(texts), rows=len(texts), nbytes=characters)
    return _timed(response, call.context.timings, sum(map(len, call.job)), None)


def _written_rows(row: PooledRow) -> int:
    (value,) = row
    if isinstance(value, SparseVector):
        return 1
    return len(value) if value.ndim > 1 else 1


def _characters(prompts: Sequence[Prompt]) -> int | None:
    """Count the characters of texts; ``None`` where there are token ids."""
    characters = 0
    for prompt in prompts:
        match prompt:
            case TextPrompt(text):
                characters += len(text)
            case PairPrompt(first, second):
                characters += len(first) + len(second)
            case _:
                return None
    return characters


def _job_characters(job: ScoreJob, *, in_pairs: bool) -> int:
    """Count the characters of all texts; of the one query once for each document if they are ``in_pairs``."""
    queries = sum(len(text_of(side)) for side in job.queries) * (len(job.documents) if in_pairs else 1)
    return queries + sum(len(text_of(side)) for side in job.documents)


def _timed(response: HttpResponse, timings: RequestTimings, tokens: int, characters: int | None) -> HttpResponse:
    """Add TEI's headers: what the model read, and timings in whole milliseconds."""
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

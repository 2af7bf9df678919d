"""What text-embeddings-inference's clients read: bare lists, and where the time went in headers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from trio_pool_serve.api.dialects.tei.wire import DecodeJob, PredictJob, TokenizeJob
from trio_pool_serve.api.fields.encodings import row_json
from trio_pool_serve.api.fields.ranking import ranked
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.prompts import PairPrompt, Prompt, TextPrompt
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import PooledRow, pool
from trio_pool_serve.tasks.reading import rendering_params
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.tasks.sides import text_of
from trio_pool_serve.tasks.tokenize import detokenize, tokenize
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import PooledValue, SparseVector, Vectors


@frozen
class Prediction:
    """One label of an answer of ``/predict``."""

    score: msgspec.Raw
    label: str


@frozen
class Rank:
    """One text of an answer of ``/rerank``."""

    index: int
    score: msgspec.Raw
    text: str | msgspec.UnsetType = msgspec.UNSET


@frozen
class SimpleToken:
    """One token of an answer of ``/tokenize``; ``start`` and ``stop`` count characters."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


# -- values to JSON --------------------------------------------------------------------------------------


def _array(items: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _numbers(values: Vectors) -> list[bytes]:
    """Return each number of a vector as JSON."""
    return row_json(values, "float32")[1:-1].split(b",") if len(values) else []


def _dense(value: PooledValue) -> bytes:
    assert not isinstance(value, SparseVector)  # noqa: S101  (nobody asks for that here)
    return row_json(value, "float32")


def _tokens(value: PooledValue) -> bytes:
    assert not isinstance(value, SparseVector)  # noqa: S101
    return _array([row_json(vector, "float32") for vector in value])


def _sparse(value: PooledValue) -> bytes:
    assert isinstance(value, SparseVector)  # noqa: S101
    numbers = zip(value.indices.tolist(), _numbers(value.values), strict=True)
    return _array([b'{"index":%d,"value":%b}' % number for number in numbers])


VALUE_JSON: Mapping[str, Callable[[PooledValue], bytes]] = {
    "embed": _dense,
    "token_embed": _tokens,
    "sparse_embed": _sparse,
}


def _predictions(value: PooledValue, model: Model) -> bytes:
    """Return the labels, best first."""
    assert not isinstance(value, SparseVector)  # noqa: S101
    labels = label_names(model, len(value))
    numbers = _numbers(value)
    return msgspec.json.encode([Prediction(msgspec.Raw(numbers[at]), labels[at]) for at, _ in ranked(value)])


def label_names(model: Model, labels: int) -> list[str]:
    """Return so many labels; transformers' own names where the model has none."""
    known = model.folder.spec.labels
    return [known[index] if index < len(known) else f"LABEL_{index}" for index in range(labels)]


# -- answers ---------------------------------------------------------------------------------------------


async def answer_vectors(call: Call[Any, PoolJob]) -> Answer:
    """Answer ``/embed``, ``/embed_all`` and ``/embed_sparse``: what the job's one task gives for each input.

    Raises what ``pool`` raises. Cancellation: at once.
    """
    (task,) = call.job.tasks
    pooled = await pool(call.model, call.job, call.timings)
    value_json = VALUE_JSON[task]
    answer = await call.encode(
        lambda: Answer(_array([value_json(value) for (value,) in pooled.rows])),
        rows=sum(map(_written_rows, pooled.rows)),
        nbytes=sum(map(_nbytes, pooled.rows)),
    )
    return _timed(answer, call.timings, pooled.prompt_tokens, _characters(call.job.prompts))


async def answer_predict(call: Call[Any, PredictJob]) -> Answer:
    """Answer ``/predict``: the labels of each input, best first.

    Raises what ``pool`` raises. Cancellation: at once.
    """
    job = call.job.pooling
    pooled = await pool(call.model, job, call.timings)

    def encode() -> Answer:
        rows = [_predictions(value, call.model) for (value,) in pooled.rows]
        return Answer(_array(rows) if call.job.is_batch else rows[0])

    nbytes = sum(map(_nbytes, pooled.rows))
    answer = await call.encode(encode, rows=nbytes // 4, nbytes=nbytes)  # each number is an object
    return _timed(answer, call.timings, pooled.prompt_tokens, _characters(job.prompts))


async def answer_rerank(call: Call[Any, ScoreJob]) -> Answer:
    """Answer ``/rerank``: the texts' indices and scores, best first.

    Raises what ``score`` raises. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.timings)
    texts = list(map(text_of, call.job.documents)) if call.wire.return_text else None

    def encode() -> Answer:
        numbers = _numbers(scores.values)
        return Answer(
            msgspec.json.encode(
                [
                    Rank(index, msgspec.Raw(numbers[index]), texts[index] if texts else msgspec.UNSET)
                    for index, _ in ranked(scores.values)
                ]
            )
        )

    nbytes = sum(map(len, texts)) if texts is not None else scores.values.nbytes
    answer = await call.encode(encode, rows=len(scores.values), nbytes=nbytes)
    return _timed(answer, call.timings, scores.prompt_tokens, _job_characters(call.job))


async def answer_similarity(call: Call[Any, ScoreJob]) -> Answer:
    """Answer ``/similarity``: a number per sentence, in order.

    Raises what ``score`` raises. Cancellation: at once.
    """
    scores = await score(call.model, call.job, call.timings)
    answer = await call.encode(lambda: Answer(row_json(scores.values, "float32")), rows=1, nbytes=scores.values.nbytes)
    return _timed(answer, call.timings, scores.prompt_tokens, _job_characters(call.job))


async def answer_tokenize(call: Call[Any, TokenizeJob]) -> Answer:
    """Answer ``/tokenize``: the tokens of each text.

    Raises what ``tokenize`` raises. Cancellation: as ``tokenize``.
    """
    reading = call.job.reading
    texts = await tokenize(
        call.model,
        call.job.texts,
        add_special_tokens=reading.add_special_tokens,
        instruction=rendering_params(call.model, reading).instruction,
    )

    def encode() -> Answer:
        return Answer(
            _array(
                [
                    msgspec.json.encode(
                        [SimpleToken(token.id, token.text, token.special, token.start, token.stop) for token in text]
                    )
                    for text in texts
                ]
            )
        )

    tokens = sum(map(len, texts))
    answer = await call.encode(encode, rows=tokens, nbytes=0)
    return _timed(answer, call.timings, tokens, sum(map(len, call.job.texts)))


async def answer_decode(call: Call[Any, DecodeJob]) -> Answer:
    """Answer ``/decode``: the text of each list of ids.

    Raises what ``detokenize`` raises. Cancellation: as ``detokenize``.
    """
    texts = await detokenize(call.model, call.job.ids, skip_special_tokens=call.job.skip_special_tokens)
    characters = sum(map(len, texts))
    answer = await call.encode(lambda: Answer(msgspec.json.encode(texts)), rows=len(texts), nbytes=characters)
    return _timed(answer, call.timings, sum(map(len, call.job.ids)), None)


# -- sizes and times -------------------------------------------------------------------------------------


def _written_rows(row: PooledRow) -> int:
    (value,) = row
    if isinstance(value, SparseVector):
        return 1
    return len(value) if value.ndim > 1 else 1


def _nbytes(row: PooledRow) -> int:
    (value,) = row
    if isinstance(value, SparseVector):
        return value.indices.nbytes + value.values.nbytes
    return value.nbytes


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


def _job_characters(job: ScoreJob) -> int:
    return sum(len(text_of(side)) for side in (*job.queries, *job.documents))


def _timed(answer: Answer, timings: RequestTimings, tokens: int, characters: int | None) -> Answer:
    """Add TEI's headers: what was read, and whole milliseconds."""
    milliseconds = {
        "x-total-time": timings.total_s,
        "x-tokenization-time": timings.render_s,
        "x-queue-time": timings.queue_s,
        "x-inference-time": timings.forward_s + timings.copy_s,
    }
    headers = {"x-compute-tokens": str(tokens)}
    if characters is not None:
        headers["x-compute-characters"] = str(characters)
    return answer.also_saying(headers | {name: str(round(seconds * 1e3)) for name, seconds in milliseconds.items()})

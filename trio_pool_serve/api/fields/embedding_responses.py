"""Responses of ``/v1/embeddings``, which several dialects share."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import msgspec
import trio
from attrs import evolve, frozen

from trio_pool_serve.api.fields.encodings import VectorEncoding
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.api.http.error_responses import describe
from trio_pool_serve.api.http.response import Emit, HttpResponse, event_stream
from trio_pool_serve.errors import ContextLengthError, DeadlineExceededError, Place, require_request
from trio_pool_serve.tasks.pool import (
    Pooled,
    PooledRow,
    PoolJob,
    check_dimensions,
    estimated_work,
    pool,
    rows_to_compute,
)
from trio_pool_serve.types import SparseVector, Vectors

Item = TypeVar("Item")

MAX_METADATA_BYTES = 4096
"""Maximum length of the ``metadata`` header: proxies and clients refuse longer ones."""


@frozen(kw_only=True)
class Usage:
    """Tokens read; pooling completes none, so both counts are the same."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0

    @classmethod
    def of(cls, tokens: int) -> "Usage":
        """Return the usage of a request of this many tokens."""
        return cls(prompt_tokens=tokens, total_tokens=tokens)


@frozen(kw_only=True)
class ListResponse(Generic[Item]):
    """An item for each input, in order."""

    id: str
    created: int
    model: str
    data: list[Item]
    usage: Usage
    object: Literal["list"] = "list"


@frozen(kw_only=True)
class EmbeddingItem:
    """One vector of a response."""

    index: int
    embedding: msgspec.Raw
    object: Literal["embedding"] = "embedding"


@frozen(kw_only=True)
class EmbeddingsResponse(ListResponse[EmbeddingItem]):
    """The response of ``/v1/embeddings``."""


def refuse_embeddings(call: Call[Any, PoolJob], *encodings: VectorEncoding) -> None:
    """Raise ``InvalidRequestError`` if vectors cannot be computed or encoded as requested, before they are computed."""
    call.model.require("embed")
    check_dimensions(call.model, call.job.dimensions)
    dimensions = call.job.dimensions or call.model.dimensions
    for encoding in encodings:
        encoding.refuse_unencodable(rows=call.job.vectors, dimensions=dimensions)


async def pool_limited(call: Call[Any, PoolJob], job: PoolJob, limit: int | None, *, name: str) -> Pooled:
    """Compute a job whose texts have at most ``limit`` tokens, by the field ``name`` of the request.

    Longer ones are truncated or refused, as the job decides for the model's maximum. Errors: as ``pool``.
    Cancellation: at once.
    """
    if limit is not None and job.input_params.truncate_to is not None:
        keep = min(limit, call.model.renderer.max_model_len)
        job = evolve(job, input_params=evolve(job.input_params, truncate_to=keep))
        limit = None
    pooled = await pool(call.model, job, call.context)
    for index, tokens in enumerate(pooled.tokens):
        if limit is not None and tokens > limit:
            raise ContextLengthError(
                f"An input has {tokens} tokens; the limit is {limit} ({name}).",
                field="prompts",
                place=Place("prompts", index if len(pooled.tokens) > 1 else None),
            )
    return pooled


def vectors_of(row: PooledRow) -> Sequence[Vectors]:
    """Return the vectors that the task ``embed`` makes of a prompt: one, or one for each chunk of a document."""
    (value,) = row
    assert not isinstance(value, SparseVector)  # noqa: S101  (of another task)
    return [*value] if value.ndim > 1 else [value]


def _item(index: int, vector: Vectors, encoding: VectorEncoding) -> EmbeddingItem:
    return EmbeddingItem(index=index, embedding=encoding.json(vector))


def encode_embeddings(
    call: Call[Any, PoolJob], vectors: Sequence[Vectors], encoding: VectorEncoding, *, tokens: int
) -> HttpResponse:
    """Return the response: JSON, or the vectors' bytes one after the other."""
    if encoding.format in ("bytes", "bytes_only"):
        return encode_bytes(call, "embd-", vectors, encoding, tokens=tokens)
    items = (_item(index, vector, encoding) for index, vector in enumerate(vectors))
    return encode_list(call, "embd-", EmbeddingsResponse, items, tokens=tokens)


def encode_list(
    call: Call[Any, Any], id_prefix: str, kind: type[ListResponse[Item]], items: Iterable[Item], *, tokens: int
) -> HttpResponse:
    """Return a response of the class ``kind``; ``tokens`` is the number read for the request."""
    return HttpResponse.json(
        kind(
            id=call.response_id(id_prefix),
            created=call.created,
            model=call.model.name,
            data=list(items),
            usage=Usage.of(tokens),
        )
    )


def encode_bytes(
    call: Call[Any, PoolJob], id_prefix: str, vectors: Sequence[Vectors], encoding: VectorEncoding, *, tokens: int
) -> HttpResponse:
    """Return the vectors' bytes one after the other; for ``bytes``, a header of ASCII JSON gives the position of each.

    A row of several vectors, shape (tokens, dimensions), is written one vector after the other.
    """
    parts = [encoding.bytes(vector) for vector in vectors]
    response = HttpResponse(b"".join(parts), "application/octet-stream")
    if encoding.format == "bytes_only":
        return response
    ends = list(accumulate(map(len, parts), initial=0))
    data = [
        {
            "index": index,
            "embed_dtype": encoding.dtype,
            "endianness": encoding.byte_order,
            "start": ends[index],
            "end": ends[index + 1],
            "shape": vector.shape,
        }
        for index, vector in enumerate(vectors)
    ]
    described = {
        "id": call.response_id(id_prefix),
        "created": call.created,
        "model": call.model.name,
        "usage": msgspec.to_builtins(Usage.of(tokens)),
        "data": data,
    }
    metadata = json.dumps(described, ensure_ascii=True, separators=(",", ":"))
    require_request(
        len(metadata) <= MAX_METADATA_BYTES,
        f"must be 'bytes_only' for {len(vectors)} vectors: a header cannot hold their metadata.",
        at="encoding_format",
    )
    return response.with_headers({"metadata": metadata})


def stream_embeddings(call: Call[Any, PoolJob], encoding: VectorEncoding) -> HttpResponse:
    """Return a stream with one event for each finished vector, then the usage.

    Errors of the request as a whole, or of the server, are raised here; a later error is the last event of the stream,
    in the shape of an error body.
    """
    require_request(
        encoding.format not in ("bytes", "bytes_only"), "must be 'float' or 'base64' with stream.", at="encoding_format"
    )

    async def produce(emit: Emit) -> None:
        def row_done(index: int, row: PooledRow) -> None:
            for number, vector in enumerate(vectors_of(row), index):
                emit(partial(_item, number, vector, encoding))

        try:
            with trio.fail_at(call.context.deadline):
                pooled = await pool(call.model, call.job, call.context, row_done)
        except trio.TooSlowError:
            error: Exception = DeadlineExceededError("The deadline has passed.")
        except Exception as raised:
            error = raised
        else:
            emit(lambda: {"object": "usage", "model": call.model.name, "usage": Usage.of(pooled.prompt_tokens)})
            return
        call.service.metrics.count_failure(error)
        _, body = call.claimed_by.dialect.error_body(describe(error, call.request_id, call.claimed_by, call.wire))
        emit(lambda: body)

    # A refusal must come before the status is sent.
    work = estimated_work(call.model, call.job, rows_to_compute(call.model, call.job), call.context)
    call.model.engine.refuse_late(work)
    return HttpResponse.events(event_stream(produce))

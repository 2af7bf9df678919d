"""Vectors sent as they are finished: ``stream: true`` on ``/v1/embeddings``."""

from typing import Any

import trio

from trio_pool_serve.api.fields.embedding_responses import EmbeddingItem, Usage, VectorEncoding
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.api.http.error_responses import describe
from trio_pool_serve.api.http.response import Emit, EventStream, HttpResponse
from trio_pool_serve.errors import DeadlineExceededError, InvalidRequestError
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import PooledRow, estimated_tokens, pool, rows_to_compute


def stream_embeddings(call: Call[Any, PoolJob], encoding: VectorEncoding) -> HttpResponse:
    """Return a stream with one event for each finished vector, then the usage.

    What is wrong with the request as a whole, or with the server, is raised here; later errors are the stream's last
    event, in the shape of an error body.
    """
    if encoding.format in ("bytes", "bytes_only"):
        raise InvalidRequestError("A stream is of JSON: use float or base64.", param="encoding_format")

    async def produce(emit: Emit) -> None:
        def row_done(index: int, row: PooledRow, tokens: int) -> None:
            del tokens  # the usage has those of all rows
            (vector,) = row
            emit(lambda: EmbeddingItem(index=index, embedding=encoding.json(vector)))  # type: ignore[arg-type]

        try:
            with trio.fail_at(call.deadline):
                pooled = await pool(call.model, call.job, call.timings, row_done)
        except trio.TooSlowError:
            error: Exception = DeadlineExceededError("The deadline has passed.")
        except Exception as raised:
            error = raised
        else:
            usage = {"object": "usage", "model": call.model.name, "usage": Usage.of(pooled.prompt_tokens)}
            emit(lambda: usage)
            return
        call.service.metrics.failures.inc()
        described = describe(error, call.request_id, call.claimed_by, call.wire)
        _, body = call.claimed_by.dialect.error_body(described)
        emit(lambda: body)

    with call.model.engine.admit(estimated_tokens(call.model, call.job, rows_to_compute(call.model, call.job))):
        # Refused here, if it is, where that can still be said by a status.
        response = HttpResponse(EventStream(produce), content_type="text/event-stream")
    return response.with_headers({"cache-control": "no-store"})

"""Vectors as they are finished: ``stream: true`` on ``/v1/embeddings``."""

import logging
from typing import Any

import trio

from trio_pool_serve.api.fields.embedding_answers import EmbeddingItem, Usage, VectorEncoding
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call
from trio_pool_serve.api.http.error_bodies import describe
from trio_pool_serve.api.http.event_stream import Emit, EventStream
from trio_pool_serve.errors import DeadlineExceededError, InvalidRequestError
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import PooledRow, estimated_tokens, pool, rows_to_compute

logger = logging.getLogger(__name__)


def stream_embeddings(call: Call[Any, PoolJob], encoding: VectorEncoding) -> Answer:
    """Return a stream with one event for each finished vector, then the usage.

    What is wrong with the request as a whole, or with the server, is raised here; what goes wrong later is the
    stream's last event, in the shape of an error body.
    """
    if encoding.format in ("bytes", "bytes_only"):
        raise InvalidRequestError("A stream is of JSON: ask for float or base64.", param="encoding_format")

    async def produce(emit: Emit) -> None:
        def row_done(index: int, row: PooledRow, tokens: int) -> None:
            del tokens  # told once, for all rows
            (vector,) = row
            emit(lambda: EmbeddingItem(index=index, embedding=encoding.json(vector)))  # type: ignore[arg-type]

        try:
            with trio.fail_at(call.deadline):
                answer = await pool(call.model, call.job, call.timings, row_done)
        except trio.TooSlowError:
            error: Exception = DeadlineExceededError("The deadline has passed.")
        except Exception as raised:
            error = raised
        else:
            usage = {"object": "usage", "model": call.model.name, "usage": Usage.of(answer.prompt_tokens)}
            emit(lambda: usage)
            return
        call.service.metrics.failures.inc()
        _, body = call.dialect.error_body(describe(error, call.request_id))
        emit(lambda: body)

    with call.model.engine.admit(estimated_tokens(call.model, call.job, rows_to_compute(call.model, call.job))):
        # Refused here, if it is, where that can still be said by a status.
        return Answer(EventStream(produce), content_type="text/event-stream", headers={"cache-control": "no-store"})

"""Outcomes of rows on their way back: ``PoolingOutput``s and errors to parts of frames, and back."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve.engine.remote.arrays import (
    FLOAT32,
    INT32,
    Payload,
    buffer_of,
    buffer_of_rows,
    concatenated,
    pieces,
)
from trio_pool_serve.engine.remote.failures import error_of, failure_of, reason_of
from trio_pool_serve.engine.remote.wire import Failure, Frame, Outputs, Part, Values, fits_in_part
from trio_pool_serve.errors import PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import Buffer
from trio_pool_serve.types import PooledValue, PoolingOutput, SparseVector

NumberedOutcome: TypeAlias = tuple[int, PoolingOutput | Exception]

_decoder: msgspec.msgpack.Decoder[Outputs | Failure] = msgspec.msgpack.Decoder(Outputs | Failure)

ITEM_BYTES = 4
"""Of float32 and int32."""


def answer_frames(batches: Iterable[Sequence[NumberedOutcome]]) -> Iterator[Frame]:
    """Yield frames with the outcomes of rows, of each batch together. An output that cannot be sent becomes a failure.

    Outcomes of one batch are sent as one part if that is possible, else in as few as are found by dividing them.
    """
    frame = Frame()
    for batch in batches:
        left = [batch] if batch else []
        while left:
            left += _add(frame, left.pop())
            if frame.is_full:
                yield frame
                frame = Frame()
    if frame.parts:
        yield frame


def _add(frame: Frame, outcomes: Sequence[NumberedOutcome]) -> list[Sequence[NumberedOutcome]]:
    """Add outcomes as one part; if that is impossible, return them divided, the last ones first."""
    try:
        _add_together(frame, outcomes)
    except Exception as error:  # heads may return anything
        if len(outcomes) > 1:
            return _divide(outcomes)[::-1]
        failed = UnsendableError(f"The model's output cannot be sent: {reason_of(error)}")
        frame.add([outcomes[0][0]], failure_of(failed))
    return []


def _add_together(frame: Frame, outcomes: Sequence[NumberedOutcome]) -> None:
    """Add outcomes as one part. Raises anything if they cannot be sent, or not as one."""
    numbers, outputs = [number for number, _ in outcomes], [output for _, output in outcomes]
    if isinstance(outputs[0], PoolingOutput):
        frame.add(numbers, *_encode(outputs))  # type: ignore[arg-type]  # raises for others than outputs
    elif len(outputs) == 1:
        frame.add(numbers, failure_of(outputs[0]))
    else:
        raise ValueError("each failure is sent by itself")


def _divide(outcomes: Sequence[NumberedOutcome]) -> list[Sequence[NumberedOutcome]]:
    """Divide outcomes by what they are, or in halves if all are of the same kind."""
    kinds: dict[Any, list[NumberedOutcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(_kind_of(outcome), []).append(outcome)
    middle = len(outcomes) // 2
    return [*kinds.values()] if len(kinds) > 1 else [outcomes[:middle], outcomes[middle:]]


def _kind_of(outcome: NumberedOutcome) -> Any:
    number, output = outcome
    if not isinstance(output, PoolingOutput):
        return number
    try:
        shapes = [value.shape[1:] if isinstance(value, np.ndarray) else None for value in output.values]
    except Exception:
        return number
    return output.queue_s, output.forward_s, output.copy_s, *shapes


def _encode(outputs: Sequence[PoolingOutput]) -> tuple[Outputs, list[Buffer]]:
    """Return outputs of one batch as they are sent. Raises anything if there are no such, or if they are too many."""
    ((queue_s, forward_s, copy_s),) = {(output.queue_s, output.forward_s, output.copy_s) for output in outputs}
    columns = [*zip(*[output.values for output in outputs], strict=True)]
    values = [_values_of(column) for column in columns]
    if not fits_in_part(len(outputs), sum([_nbytes_of(each) for each in values])):
        raise ValueError("too many outputs for one part")
    buffers = [buffer for column, each in zip(columns, values, strict=True) for buffer in _buffers_of(column, each)]
    return Outputs(queue_s, forward_s, copy_s, values), buffers


def _nbytes_of(values: Values) -> int:
    return ITEM_BYTES * sum(values.lengths) * (2 if values.is_sparse else math.prod(values.shape))


def _values_of(column: Sequence[PooledValue]) -> Values:
    first = column[0]
    if isinstance(first, SparseVector):
        return Values([len(value.indices) for value in column], is_sparse=True)  # type: ignore[union-attr]
    return Values([*map(len, column)], first.shape[1:])  # type: ignore[arg-type]


def _buffers_of(column: Sequence[Any], values: Values) -> list[Buffer]:
    if values.is_sparse:
        return [
            buffer_of_rows([value.indices for value in column], INT32, values.lengths),
            buffer_of_rows([value.values for value in column], FLOAT32, values.lengths),
        ]
    return [buffer_of(concatenated(column, FLOAT32))]


@frozen(eq=False)
class ReadOutputs:
    """The values of a part's rows, and the times (seconds) of their batch."""

    rows: Sequence[tuple[PooledValue, ...]]
    queue_s: float
    forward_s: float
    copy_s: float


def read_answers(part: Part, payload: Payload) -> ReadOutputs | PoolServeError:
    """Decode the outcomes of a part's rows: one error for all if it is a failure, or cannot be decoded.

    Arrays share the payload's memory.
    """
    try:
        part.require_usual_size()
        answer = _decoder.decode(part.content)
        if isinstance(answer, Failure):
            return error_of(answer)
        columns = [_read_values(values, payload) for values in answer.values]
        rows = [*zip(*columns, strict=True)] if columns else [()] * len(part.ids)
        if len(rows) != len(part.ids):
            raise ValueError(f"{len(rows)} outputs with {len(part.ids)} numbers")  # noqa: TRY301
        return ReadOutputs(rows, answer.queue_s, answer.forward_s, answer.copy_s)
    except Exception as error:
        return UnsendableError(f"The engine process's output cannot be read: {reason_of(error)}")


def _read_values(values: Values, payload: Payload) -> Sequence[PooledValue]:
    total, lengths = sum(values.lengths), values.lengths
    if values.is_sparse:
        indices = payload.take(("<i4", (total,)))
        weights = payload.take(("<f4", (total,)))
        return list(map(SparseVector, pieces(indices, lengths), pieces(weights, lengths)))
    return pieces(payload.take(("<f4", (total, *values.shape))), lengths)

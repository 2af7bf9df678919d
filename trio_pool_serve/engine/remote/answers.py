"""Outcomes of rows on their way back: ``PoolingOutput``s and errors to parts of frames, and back."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.arrays import (
    FLOAT32,
    INT32,
    Payload,
    buffer_of,
    buffer_of_rows,
    concatenated,
    pieces,
)
from trio_pool_serve.engine.remote.wire import (
    Failure,
    Frame,
    Outputs,
    Part,
    Values,
    fits_in_part,
    frames_of,
    halves,
    message_of,
    reason_of,
)
from trio_pool_serve.errors import BatchFailedError, PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import Buffer, sendable
from trio_pool_serve.types import PooledValue, PoolingOutput, SparseVector

NumberedOutcome: TypeAlias = tuple[int, PoolingOutput | Exception]

_decoder: msgspec.msgpack.Decoder[Outputs | Failure] = msgspec.msgpack.Decoder(Outputs | Failure)

ITEM_BYTES = 4
"""Of float32 and int32."""

NOT_OF_AN_ENGINE = (errors.MethodNotAllowedError, errors.OverloadedError)
"""Errors that are made of more than a message."""

FAILURES: Mapping[str, type[PoolServeError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PoolServeError) and kind not in NOT_OF_AN_ENGINE
}
"""Error classes by the name that is sent. Any other error of an engine arrives as ``BatchFailedError``."""


def answer_frames(batches: Iterable[Sequence[NumberedOutcome]]) -> Iterator[Frame]:
    """Yield frames with the outcomes of rows, of each batch together. An output that cannot be sent becomes a failure.

    Outcomes of one batch are sent as one part if that is possible, else in as few as are found by dividing them.
    """

    def refuse(frame: Frame, number: int, error: Exception) -> None:
        failed = UnsendableError(f"The model's output cannot be sent: {reason_of(error)}")
        frame.add([number], _failure_of(failed))

    return frames_of(batches, _encode, refuse, _divide)


def _divide(outcomes: Sequence[NumberedOutcome]) -> Sequence[Sequence[NumberedOutcome]]:
    """Divide outcomes by what they are, or in halves if all are of the same kind."""
    kinds: dict[Any, list[NumberedOutcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(_kind_of(outcome), []).append(outcome)
    return [*kinds.values()] if len(kinds) > 1 else halves(outcomes)


def _kind_of(outcome: NumberedOutcome) -> Any:
    number, output = outcome
    if not isinstance(output, PoolingOutput):
        return number
    try:
        shapes = [value.shape[1:] if isinstance(value, np.ndarray) else None for value in output.values]
    except Exception:
        return number
    return output.queue_s, output.forward_s, output.copy_s, *shapes


def _encode(outcomes: Sequence[Any]) -> tuple[Outputs | Failure, list[Buffer]]:
    """Return outputs of one batch, or one error, as they are sent. Raises anything for others, or if they are many."""
    if isinstance(outcomes[0], Exception):
        (error,) = outcomes
        return _failure_of(error), []
    ((queue_s, forward_s, copy_s),) = {(output.queue_s, output.forward_s, output.copy_s) for output in outcomes}
    columns = [*zip(*[output.values for output in outcomes], strict=True)]
    values = [_values_of(column) for column in columns]
    if not fits_in_part(len(outcomes), sum([_nbytes_of(each) for each in values])):
        raise ValueError("too many outputs for one part")
    buffers = [buffer for column, each in zip(columns, values, strict=True) for buffer in _buffers_of(column, each)]
    return Outputs(queue_s, forward_s, copy_s, values), buffers


def _failure_of(error: Exception) -> Failure:
    """Return an error as it is sent: as the nearest of its bases that the receiver knows."""
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    return Failure(next(kinds, BatchFailedError.__name__), sendable(message_of(error)))


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
            return FAILURES.get(answer.kind, BatchFailedError)(answer.message)
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

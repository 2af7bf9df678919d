"""Outcomes of rows on their way back: ``PoolingOutput``s and errors to parts of frames, and back."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.arrays import FLOAT32, INT32, concatenated, of_rows, pieces
from trio_pool_serve.engine.remote.frames import (
    Frame,
    ReceivedPart,
    frames_of,
    halves,
    message_of,
    reason_of,
    require_one_part,
)
from trio_pool_serve.engine.remote.wire import Failure, Outputs, Values
from trio_pool_serve.errors import BatchFailedError, PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import sendable
from trio_pool_serve.types import PooledValue, PoolingOutput, SparseVector

NumberedOutcome: TypeAlias = tuple[int, PoolingOutput | Exception]

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

    return frames_of(batches, _content_of, refuse, _divide)


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


def _content_of(outcomes: Sequence[Any]) -> Outputs:
    """Return outputs of one batch, or one error, as they are sent. Raises anything for others, or if they are many."""
    if isinstance(outcomes[0], Exception):
        (error,) = outcomes
        return _failure_of(error)
    ((queue_s, forward_s, copy_s),) = {(output.queue_s, output.forward_s, output.copy_s) for output in outcomes}
    columns = zip(*[output.values for output in outcomes], strict=True)
    return Outputs(queue_s, forward_s, copy_s, [_values_of(column) for column in columns])


def _failure_of(error: Exception) -> Outputs:
    """Return an error as it is sent: as the nearest of its bases that the receiver knows."""
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    failure = Failure(next(kinds, BatchFailedError.__name__), sendable(message_of(error)))
    return Outputs(failure=failure)


def _values_of(column: Sequence[Any]) -> Values:
    first = column[0]
    if isinstance(first, SparseVector):
        lengths = [len(value.indices) for value in column]
        require_one_part(len(column), 2 * FLOAT32.itemsize * sum(lengths))
        indices = of_rows([value.indices for value in column], INT32, lengths)
        return Values(lengths, of_rows([value.values for value in column], FLOAT32, lengths), indices)
    lengths = [*map(len, column)]
    require_one_part(len(column), FLOAT32.itemsize * sum(lengths) * math.prod(first.shape[1:]))
    return Values(lengths, concatenated(column, FLOAT32))


def read_answers(part: ReceivedPart) -> tuple[Outputs, Sequence[tuple[PooledValue, ...]]]:
    """Decode the outputs of a part's rows, and return them with the values of each row.

    Raises the ``PoolServeError`` of all of them if it is a failure, or ``UnsendableError`` if it cannot be decoded.
    Arrays share the payload's memory.
    """
    try:
        outputs: Outputs = part.decode(Outputs)
        columns = [_read_values(values) for values in outputs.values]
        rows = [*zip(*columns, strict=True)] if columns else [()] * len(part.ids)
        if len(rows) != len(part.ids):
            raise ValueError(f"{len(rows)} outputs with {len(part.ids)} numbers")  # noqa: TRY301
    except Exception as error:
        raise UnsendableError(f"The engine process's output cannot be read: {reason_of(error)}") from error
    if (failure := outputs.failure) is not None:
        raise FAILURES.get(failure.kind, BatchFailedError)(failure.message)
    return outputs, rows


def _read_values(values: Values) -> Sequence[PooledValue]:
    if values.indices is None:
        return pieces(values.values, FLOAT32, values.lengths, *values.values.shape[1:])
    indices = pieces(values.indices, INT32, values.lengths)
    return [*map(SparseVector, indices, pieces(values.values, FLOAT32, values.lengths))]

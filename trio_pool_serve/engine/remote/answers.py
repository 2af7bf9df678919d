"""Outcomes of rows on their way back: ``PoolingOutput``s and errors to parts of frames, and back."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from trio_pool_serve.engine.remote.arrays import Payload, buffer_of, buffer_of_rows, concatenated, pieces
from trio_pool_serve.engine.remote.failures import error_of, failure_of, reason_of
from trio_pool_serve.engine.remote.wire import Failure, Frame, Outputs, Part, Values, divided
from trio_pool_serve.errors import PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import Buffer
from trio_pool_serve.types import PooledValue, PoolingOutput, SparseVector

NumberedOutcome: TypeAlias = tuple[int, PoolingOutput | Exception]


def answer_frames(outcomes: Iterable[NumberedOutcome]) -> Iterator[Frame]:
    """Yield frames with all outcomes, in order. An output that cannot be sent is sent as a failure."""
    frame = Frame()
    for _, alike in itertools.groupby(outcomes, _shared):
        part = list(alike)
        for some in divided(part, max(map(_bytes_of, part))) if len(part) > 1 else [part]:
            _add(frame, some)
            if frame.is_full:
                yield frame
                frame = Frame()
    if frame.parts:
        yield frame


def _shared(outcome: NumberedOutcome) -> Any:
    """Return what the outcomes of one part have in common: the times of the batch, and the kinds of values.

    Or a number, which they share with no others.
    """
    number, output = outcome
    if not isinstance(output, PoolingOutput):
        return number
    try:
        kinds = [value.shape[1:] if isinstance(value, np.ndarray) else None for value in output.values]
    except Exception:  # heads may return anything
        return number
    return output.forward_s, output.copy_s, kinds


def _bytes_of(outcome: NumberedOutcome) -> int:
    """Return about how many bytes the arrays of an output have."""
    nbytes = 0
    for value in outcome[1].values:  # type: ignore[union-attr]  # errors share a part with no others
        array = value if isinstance(value, np.ndarray) else getattr(value, "indices", None)
        nbytes += getattr(array, "nbytes", 0)
    return nbytes


def _add(frame: Frame, outcomes: list[NumberedOutcome]) -> None:
    numbers, outputs = [number for number, _ in outcomes], [output for _, output in outcomes]
    error = outputs[0]
    if isinstance(error, PoolingOutput):
        try:
            frame.add(numbers, *_encode(outputs))  # type: ignore[arg-type]  # all are outputs if the first one is
        except Exception as raised:  # heads may return anything
            if len(outcomes) > 1:  # one may be guilty
                for outcome in outcomes:
                    _add(frame, [outcome])
                return
            error = UnsendableError(f"The model's output cannot be sent: {reason_of(raised)}")
        else:
            return
    frame.add(numbers, failure_of(error))


def _encode(outputs: Sequence[PoolingOutput]) -> tuple[Outputs, list[Buffer]]:
    first, buffers = outputs[0], list[Buffer]()
    values = [_concatenate(values, buffers) for values in zip(*[output.values for output in outputs], strict=True)]
    return Outputs([output.queue_s for output in outputs], first.forward_s, first.copy_s, values), buffers


def _concatenate(values: Sequence[PooledValue], buffers: list[Buffer]) -> Values:
    """Return the lengths of values of one kind, and add their arrays to ``buffers``."""
    if isinstance(values[0], SparseVector):
        lengths = [len(value.indices) for value in values]  # type: ignore[union-attr]
        buffers.append(buffer_of_rows([value.indices for value in values], np.int32, lengths))  # type: ignore[union-attr]
        buffers.append(buffer_of_rows([value.values for value in values], np.float32, lengths))  # type: ignore[union-attr]
        return Values(lengths, is_sparse=True)
    buffers.append(buffer_of(concatenated(values, np.float32)))  # type: ignore[arg-type]
    return Values([len(value) for value in values], values[0].shape[1:])  # type: ignore[arg-type]


def read_answers(part: Part, payload: Payload) -> list[PoolingOutput] | PoolServeError:
    """Decode the outcomes of a part's rows: one error for all if it is a failure, or cannot be decoded.

    Arrays share the payload's memory.
    """
    try:
        answer = msgspec.msgpack.decode(part.content, type=Outputs | Failure)
        if isinstance(answer, Failure):
            return error_of(answer)
        columns = [_read_values(values, payload) for values in answer.values]
        rows = zip(*columns, strict=True) if columns else [()] * len(part.ids)
        return [
            PoolingOutput(values, queue_s, answer.forward_s, answer.copy_s)
            for _, queue_s, values in zip(part.ids, answer.queue_s, rows, strict=True)
        ]
    except Exception as error:
        return UnsendableError(f"The engine process's output cannot be read: {reason_of(error)}")


def _read_values(values: Values, payload: Payload) -> Sequence[PooledValue]:
    total, lengths = sum(values.lengths), values.lengths
    if values.is_sparse:
        indices = payload.take(("<i4", (total,)))
        weights = payload.take(("<f4", (total,)))
        return list(map(SparseVector, pieces(indices, lengths), pieces(weights, lengths)))
    return pieces(payload.take(("<f4", (total, *values.shape))), lengths)

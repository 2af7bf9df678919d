"""Rows and their outcomes as parts of frames: ``PoolingRequest``s to an engine process, outputs and errors back."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.frames import (
    BOOL,
    FLOAT32,
    INT32,
    Frame,
    ReceivedPart,
    concatenated,
    encode,
    frames_of,
    message_of,
    of_rows,
    pieces,
    reason_of,
    require_one_part,
    require_valid,
)
from trio_pool_serve.engine.remote.wire import Failure, LonePrompt, Outputs, Rows, Values
from trio_pool_serve.processes.framed_stream import Buffer, sendable
from trio_pool_serve.types import (
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseVector,
)

T = TypeVar("T")

NumberedRow: TypeAlias = tuple[int, PoolingRequest]


def row_frames(rows: Iterable[NumberedRow], failed: Callable[[int, errors.UnsendableError], None]) -> Iterator[Frame]:
    """Yield frames with all rows, in order. ``failed(number, error)`` is called for each row that cannot be sent."""

    def refuse(_: Frame, number: int, error: Exception) -> None:
        failed(number, errors.UnsendableError(f"An input cannot be sent to the engine process: {reason_of(error)}"))

    return frames_of(_alike([*rows]), _rows_of, refuse)


def _alike(rows: Sequence[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """Return groups of neighbours that may be one part."""
    params = {id(request.params): request.params for _, request in rows}
    encoded = {key: _encoded(each) for key, each in params.items()}
    """Params are compared by these bytes: their own comparison may do anything."""

    in_common = [
        (
            encoded[id(request.params)] or number,
            request.adapter,
            (prompt := request.prompt).route,
            prompt.type_ids is None,
            prompt.kept is None,
            None if prompt.embeds is None and prompt.images is None and prompt.chunks is None else number,
        )
        for number, request in rows
    ]
    by_common = itertools.groupby(zip(in_common, rows, strict=True), itemgetter(0))
    return ([row for _, row in alike] for _, alike in by_common)


def _encoded(params: Sequence[PoolingParams]) -> bytes | None:
    buffers: list[Buffer] = []
    try:
        return b"".join([encode(_named(params), buffers), *buffers])
    except Exception:  # the row will fail for it
        return None


def _named(params: Sequence[PoolingParams]) -> list[tuple[str, Any]]:
    return [(each.wire_name, each) for each in params]


def _lone(prompt: RenderedPrompt) -> LonePrompt | None:
    if prompt.embeds is None and prompt.images is None and prompt.chunks is None:
        return None
    return LonePrompt(prompt.embeds, prompt.chunks, prompt.images)


def _rows_of(requests: Sequence[PoolingRequest]) -> Rows:
    """Encode rows. Raises any error if they cannot be one part, or if there are too many."""
    prompts = [request.prompt for request in requests]
    prompt, lengths = prompts[0], [len(prompt.token_ids) for prompt in prompts]
    require_one_part(len(requests), INT32.itemsize * sum(lengths))
    return Rows(
        lengths,
        _column([prompt.instruction_tokens for prompt in prompts]),
        _column([prompt.attended for prompt in prompts]),
        of_rows([prompt.token_ids for prompt in prompts], INT32, lengths),
        None if prompt.type_ids is None else of_rows([each.type_ids for each in prompts], INT32, lengths),
        None if prompt.kept is None else of_rows([each.kept for each in prompts], BOOL, lengths),
        _lone(prompt),
        prompt.route,
        requests[0].adapter,
        _named(requests[0].params),
    )


def _column(values: list[T]) -> list[T]:
    return values[:1] if len({*values}) == 1 else values


def read_rows(part: ReceivedPart, planned: int | None = None) -> list[PoolingRequest]:
    """Decode the rows of a part, which may belong to a planned batch; their arrays share the payload's memory.

    Raises ``UnsendableError``.
    """
    try:
        rows = part.decode(Rows)
        require_valid(len(rows.lengths) == len(part.ids), f"{len(rows.lengths)} rows with {len(part.ids)} numbers")
        prompts = _prompts(rows)
        params = tuple([_param(name, fields, part) for name, fields in rows.params])
        return [PoolingRequest(prompt, params, planned=planned, adapter=rows.adapter) for prompt in prompts]
    except Exception as error:  # constructors of params may raise anything
        raise errors.UnsendableError(f"The engine process cannot read an input: {reason_of(error)}") from error


def _prompts(rows: Rows) -> list[RenderedPrompt]:
    lengths, lone = rows.lengths, rows.lone or LonePrompt(None, None, None)
    none = [None] * len(lengths)
    if rows.lone is not None:
        _require_alone(lone, lengths)
    columns = zip(
        pieces(rows.token_ids, INT32, lengths),
        _counts(rows.instruction_tokens, lengths),
        none if rows.type_ids is None else pieces(rows.type_ids, INT32, lengths),
        _counts(rows.attended, lengths),
        none if rows.kept is None else pieces(rows.kept, BOOL, lengths),
        *([value] * len(lengths) for value in (lone.images, lone.embeds, lone.chunks, rows.route)),
        strict=True,
    )
    return [*itertools.starmap(RenderedPrompt, columns)]


def _counts(column: Sequence[int | None], lengths: Sequence[int]) -> Sequence[int | None]:
    """Return a count for each row of a ``_column``.

    Raises ``ValueError`` if one exceeds the tokens of its row: on a GPU it would be an address.
    """
    limits = lengths if len(column) > 1 else [min(lengths)]
    require_valid(
        all(count is None or 0 <= count <= most for count, most in zip(column, limits, strict=True)),
        "a row has fewer tokens than announced",
    )
    return column if len(column) > 1 else [*column] * len(lengths)


def _require_alone(lone: LonePrompt, lengths: Sequence[int]) -> None:
    """Raise ``ValueError`` for several rows, or for chunks beyond a row's tokens: on a GPU they would be addresses."""
    require_valid(len(lengths) == 1, "only a row that is sent alone may have these arrays")
    require_valid(
        lone.embeds is None or (lone.embeds.ndim == 2 and len(lone.embeds) == lengths[0]),
        "the token embeddings are not one per token",
    )
    if (chunks := lone.chunks) is not None:
        require_valid(
            chunks.dtype == INT32 and chunks.ndim == 2 and chunks.shape[1] == 2 and len(chunks) > 0,
            "chunks are not pairs of numbers",
        )
        begins, ends = chunks.T
        require_valid(
            begins.min() >= 0 and ends.max() <= lengths[0] and bool((begins < ends).all()),
            "a row has fewer tokens than its chunks",
        )


def _param(name: str, fields: Any, part: ReceivedPart) -> PoolingParams:
    if name not in PoolingParams.by_name:
        raise LookupError(f"no module imported here defines the pooling params {name}")
    return part.convert(fields, PoolingParams.by_name[name])


NumberedOutcome: TypeAlias = tuple[int, PoolingOutput | Exception]

NOT_OF_AN_ENGINE = (errors.MethodNotAllowedError, errors.MissingFieldError, errors.OverloadedError)
"""Errors whose constructors do not take a message alone."""

FAILURES: Mapping[str, type[errors.PoolServeError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PoolServeError) and kind not in NOT_OF_AN_ENGINE
}
"""Error classes by the name that is sent. Any other error arrives as ``BatchFailedError``."""


def answer_frames(batches: Iterable[Sequence[NumberedOutcome]]) -> Iterator[Frame]:
    """Yield frames with the outcomes of rows, batch by batch. An output that cannot be sent becomes a failure.

    Outcomes of one batch are sent as one part if possible, otherwise they are split into as few parts as can be found.
    """

    def refuse(frame: Frame, number: int, error: Exception) -> None:
        frame.add(
            [number], _failure_of(errors.UnsendableError(f"The model's output cannot be sent: {reason_of(error)}"))
        )

    return frames_of(batches, _content_of, refuse, _kind_of)


def _kind_of(outcome: tuple[int, Any]) -> object:
    number, output = outcome
    try:
        shapes = [value.shape[1:] if isinstance(value, np.ndarray) else None for value in output.values]
        kind = output.queue_s, output.forward_s, output.copy_s, *shapes
    except Exception:  # an error, which has no values, or an output that cannot be sent
        return number
    return kind


def _content_of(outcomes: Sequence[Any]) -> Outputs:
    """Encode outputs of one batch, or one error. Raises any error if they cannot be one part."""
    if isinstance(outcomes[0], Exception):
        (error,) = outcomes
        return _failure_of(error)
    queue_s, forward_s, copy_s = outcomes[0].queue_s, outcomes[0].forward_s, outcomes[0].copy_s
    others = [o for o in outcomes if o.queue_s != queue_s or o.forward_s != forward_s or o.copy_s != copy_s]
    require_valid(not others, "outputs of several batches")
    columns = zip(*[output.values for output in outcomes], strict=True)
    return Outputs(queue_s, forward_s, copy_s, [_values_of(column) for column in columns])


def _failure_of(error: Exception) -> Outputs:
    """Encode an error as the nearest of its base classes that the receiver knows."""
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    return Outputs(failure=Failure(next(kinds, errors.BatchFailedError.__name__), sendable(message_of(error))))


def _values_of(column: Sequence[Any]) -> Values:
    if isinstance(column[0], SparseVector):
        lengths = [len(value.indices) for value in column]
        require_one_part(len(column), 2 * FLOAT32.itemsize * sum(lengths))
        return Values(
            lengths,
            of_rows([value.values for value in column], FLOAT32, lengths),
            of_rows([value.indices for value in column], INT32, lengths),
        )
    lengths = [*map(len, column)]
    require_one_part(len(column), FLOAT32.itemsize * sum(lengths) * math.prod(column[0].shape[1:]))
    return Values(lengths, concatenated(column, FLOAT32))


def read_answers(part: ReceivedPart) -> tuple[Outputs, Sequence[tuple[PooledValue, ...]]]:
    """Decode the outputs of a part's rows, and return them with the values of each row.

    If the part is a failure, raises its ``PoolServeError``; if it cannot be decoded, ``UnsendableError``. Arrays share
    the payload's memory.
    """
    try:
        outputs = part.decode(Outputs)
        columns = [_read_values(values) for values in outputs.values]
        rows = [*zip(*columns, strict=True)] if columns else [()] * len(part.ids)
        require_valid(len(rows) == len(part.ids), f"{len(rows)} outputs with {len(part.ids)} numbers")
    except Exception as error:
        raise errors.UnsendableError(f"The engine process's output cannot be read: {reason_of(error)}") from error
    if (failure := outputs.failure) is not None:
        raise FAILURES.get(failure.kind, errors.BatchFailedError)(failure.message)
    return outputs, rows


def _read_values(values: Values) -> Sequence[PooledValue]:
    if values.indices is None:
        return pieces(values.values, FLOAT32, values.lengths, *values.values.shape[1:])
    indices = pieces(values.indices, INT32, values.lengths)
    return [*map(SparseVector, indices, pieces(values.values, FLOAT32, values.lengths))]

"""Rows on their way to an engine process: ``PoolingRequest``s to parts of frames, and back."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from trio_pool_serve.engine.remote.arrays import (
    BOOL,
    INT32,
    Array,
    ArrayHeader,
    Payload,
    buffer_of,
    buffer_of_rows,
    header_of,
    pieces,
)
from trio_pool_serve.engine.remote.failures import reason_of
from trio_pool_serve.engine.remote.wire import FULL_FRAME_ROWS, Frame, OptionalArrays, Part, Rows, fits_in_part
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import Buffer
from trio_pool_serve.types import ImageFeatures, PlannedBatch, PoolingParams, PoolingRequest, RenderedPrompt

T = TypeVar("T")

NumberedRow: TypeAlias = tuple[int, PoolingRequest]

EncodedParams: TypeAlias = tuple[Sequence[PoolingParams], bytes | None]
"""Params, kept alive, and the bytes by which they are compared: comparing them may do anything. ``None`` if they cannot
be encoded."""

_decoder = msgspec.msgpack.Decoder(Rows)

TOKEN_ARRAYS = {"type_ids": INT32, "kept": BOOL}
"""Arrays that a prompt may have besides its ids, with an element for each token."""


def row_frames(rows: Iterable[NumberedRow], failed: Callable[[int, UnsendableError], None]) -> Iterator[Frame]:
    """Yield frames with all rows, in order. ``failed(number, error)`` is called for each that cannot be sent."""
    frame = Frame()
    encoded: dict[int, EncodedParams] = {}
    for _, alike in itertools.groupby(rows, partial(_shared, encoded)):
        while some := [*itertools.islice(alike, FULL_FRAME_ROWS)]:
            left = [some]
            while left:
                left += _add(frame, left.pop(), failed)
                if frame.is_full:
                    yield frame
                    frame = Frame()
    if frame.parts:
        yield frame


def _shared(encoded: dict[int, EncodedParams], row: NumberedRow) -> tuple[Any, ...]:
    """Return what rows of one part have in common. ``encoded`` has the params that are encoded already, by ``id``."""
    number, request = row
    params, prompt = request.params, request.prompt
    if id(params) not in encoded:
        encoded[id(params)] = params, _encoded(params)
    _, of_params = encoded[id(params)]
    is_alone = _has_optional_arrays(prompt) or of_params is None
    return of_params, prompt.type_ids is None, prompt.kept is None, number if is_alone else None


def _has_optional_arrays(prompt: RenderedPrompt) -> bool:
    return prompt.embeds is not None or prompt.images is not None or prompt.chunks is not None


def _encoded(params: Sequence[PoolingParams]) -> bytes | None:
    buffers: list[Buffer] = []
    try:
        return b"".join([*(_encoded_param(param, buffers) for param in params), *buffers])
    except Exception:  # the row will fail for it
        return None


def _encoded_param(param: PoolingParams, buffers: list[Buffer]) -> msgspec.Raw:
    """Encode params as in ``Rows``, and add their arrays to ``buffers``. Raises what msgspec raises."""

    def header(value: object) -> ArrayHeader:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} has no form in msgpack")
        buffers.append(buffer_of(value))
        return header_of(value)

    return msgspec.Raw(msgspec.msgpack.encode((param.wire_name, param), enc_hook=header))


def _add(
    frame: Frame, rows: list[NumberedRow], failed: Callable[[int, UnsendableError], None]
) -> Sequence[list[NumberedRow]]:
    """Add rows as one part; if that is impossible, return their halves, the second one first."""
    try:
        frame.add([number for number, _ in rows], *_encode([request for _, request in rows]))
    except Exception as error:  # fields of params may be of any type
        if len(rows) > 1:  # one may be guilty, or they are too many
            middle = len(rows) // 2
            return rows[middle:], rows[:middle]
        refused = UnsendableError(f"An input cannot be sent to the engine process: {reason_of(error)}")
        refused.__cause__ = error
        failed(rows[0][0], refused)
    return ()


def _encode(requests: Sequence[PoolingRequest]) -> tuple[Rows, list[Buffer]]:
    prompts = [request.prompt for request in requests]
    request, prompt = requests[0], prompts[0]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if not fits_in_part(len(requests), INT32.itemsize * sum(lengths)):
        raise ValueError("too many rows for one part")
    buffers = [buffer_of_rows([prompt.token_ids for prompt in prompts], INT32, lengths)]
    names = tuple([name for name in TOKEN_ARRAYS if getattr(prompt, name) is not None])
    buffers += [
        buffer_of_rows([getattr(prompt, name) for prompt in prompts], TOKEN_ARRAYS[name], lengths) for name in names
    ]
    optional_arrays = _optional_arrays(prompt, buffers)
    params: list[Any] = [_encoded_param(param, buffers) for param in request.params]
    rows = Rows(
        lengths,
        params,
        _column([prompt.instruction_tokens for prompt in prompts]),
        _column([prompt.attended for prompt in prompts]),
        names,
        optional_arrays,
    )
    return rows, buffers


def _column(values: list[T]) -> list[T]:
    return values[:1] if len(values) > 1 and len({*values}) == 1 else values


def _optional_arrays(prompt: RenderedPrompt, buffers: list[Buffer]) -> OptionalArrays | None:
    if not _has_optional_arrays(prompt):
        return None
    optional_arrays = OptionalArrays()
    if prompt.embeds is not None:
        optional_arrays.embeds = header_of(prompt.embeds)
        buffers.append(buffer_of(prompt.embeds))
    if prompt.chunks is not None:
        optional_arrays.chunks = header_of(prompt.chunks)
        buffers.append(buffer_of(prompt.chunks))
    if prompt.images is not None:
        optional_arrays.images = [(name, header_of(array)) for name, array in prompt.images.arrays.items()]
        optional_arrays.image_tokens = prompt.images.tokens
        buffers += [buffer_of(array) for array in prompt.images.arrays.values()]
    return optional_arrays


def read_rows(part: Part, payload: Payload, planned: PlannedBatch | None = None) -> list[PoolingRequest]:
    """Decode the rows of a part, maybe of a planned batch; their arrays share the payload's memory.

    Raises ``UnsendableError``.
    """
    try:
        part.require_usual_size()
        rows = _decoder.decode(part.content)
        if len(rows.lengths) != len(part.ids):
            raise ValueError(f"{len(rows.lengths)} rows with {len(part.ids)} numbers")  # noqa: TRY301
        prompts = _prompts(rows, payload)
        params = tuple([_param(name, fields, payload) for name, fields in rows.params])
        return [PoolingRequest(prompt, params, planned=planned) for prompt in prompts]
    except Exception as error:  # constructors of params may raise anything
        raise UnsendableError(f"The engine process cannot read an input: {reason_of(error)}") from error


def _prompts(rows: Rows, payload: Payload) -> list[RenderedPrompt]:
    total, count = sum(rows.lengths), len(rows.lengths)
    ids = pieces(payload.take(("<i4", (total,))), rows.lengths)
    instruction_tokens, attended = _of_each(rows.instruction_tokens, count), _of_each(rows.attended, count)
    _require_within(rows.lengths, instruction_tokens, attended)
    if not rows.token_arrays and rows.optional_arrays is None:
        return [
            RenderedPrompt(row, instruction, None, tokens)
            for row, instruction, tokens in zip(ids, instruction_tokens, attended, strict=True)
        ]
    arrays = {
        name: pieces(payload.take((TOKEN_ARRAYS[name].str, (total,))), rows.lengths) for name in rows.token_arrays
    }
    embeds, chunks, images = _read_optional_arrays(rows, payload)
    nothing = [None] * count
    return [
        RenderedPrompt(row, instruction, type_ids, tokens, kept, images, embeds, chunks)
        for row, instruction, tokens, type_ids, kept in zip(
            ids,
            instruction_tokens,
            attended,
            arrays.get("type_ids", nothing),
            arrays.get("kept", nothing),
            strict=True,
        )
    ]


def _require_within(lengths: Sequence[int], *counts: Sequence[int | None]) -> None:
    """Raise ``ValueError`` for numbers of a row's tokens that it does not have: on a GPU they would be addresses."""
    for column in counts:
        if column.count(column[0]) == len(column) and not column[0]:  # nothing is said of any row
            continue
        if any(count is not None and not 0 <= count <= length for count, length in zip(column, lengths, strict=True)):
            raise ValueError("a row has fewer tokens than are said of it")


def _of_each(column: list[T], count: int) -> list[T]:
    return column * count if len(column) == 1 else column


def _read_optional_arrays(rows: Rows, payload: Payload) -> tuple[Array | None, Array | None, ImageFeatures | None]:
    embeds = chunks = images = None
    if (headers := rows.optional_arrays) is not None:
        if len(rows.lengths) != 1:
            raise ValueError("only a row that is alone has these arrays")
        if headers.embeds is not None:
            embeds = payload.take(headers.embeds)
            if embeds.ndim != 2 or len(embeds) != rows.lengths[0]:
                raise ValueError("token embeddings are not one for each token")
        if headers.chunks is not None:
            chunks = payload.take(headers.chunks)
            _require_chunks(chunks, rows.lengths[0])
        if headers.images is not None:
            images = ImageFeatures({name: payload.take(array) for name, array in headers.images}, headers.image_tokens)
    return embeds, chunks, images


def _require_chunks(chunks: Array, tokens: int) -> None:
    """Raise ``ValueError`` for chunks of tokens that a row does not have: on a GPU they would be addresses."""
    if chunks.dtype != INT32 or chunks.ndim != 2 or chunks.shape[1] != 2 or not len(chunks):
        raise ValueError("chunks are not pairs of numbers")
    begins, ends = chunks.T
    if begins.min() < 0 or ends.max() > tokens or (begins >= ends).any():
        raise ValueError("a row has fewer tokens than its chunks")


def _param(name: str, fields: Any, payload: Payload) -> PoolingParams:
    if name not in PoolingParams.by_name:
        raise LookupError(f"no module that is imported here defines the params {name}")

    def array(_: object, header: Any) -> Array:
        return payload.take(msgspec.convert(header, ArrayHeader))

    return msgspec.convert(fields, PoolingParams.by_name[name], dec_hook=array)

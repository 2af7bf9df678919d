"""Rows on their way to an engine process: ``PoolingRequest``s to parts of frames, and back."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from trio_pool_serve.engine.remote.arrays import (
    BOOL,
    INT32,
    Array,
    ArrayHeader,
    Payload,
    buffer_of_rows,
    pieces,
    put,
)
from trio_pool_serve.engine.remote.wire import (
    FULL_FRAME_ROWS,
    Frame,
    OptionalArrays,
    Part,
    Rows,
    fits_in_part,
    frames_of,
    halves,
    reason_of,
)
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import Buffer
from trio_pool_serve.types import ImageFeatures, PlannedBatch, PoolingParams, PoolingRequest, RenderedPrompt

T = TypeVar("T")

NumberedRow: TypeAlias = tuple[int, PoolingRequest]

_decoder = msgspec.msgpack.Decoder(Rows)

TOKEN_ARRAYS = {"type_ids": INT32, "kept": BOOL}
"""Arrays that a prompt may have besides its ids, with an element for each token."""


def row_frames(rows: Iterable[NumberedRow], failed: Callable[[int, UnsendableError], None]) -> Iterator[Frame]:
    """Yield frames with all rows, in order. ``failed(number, error)`` is called for each that cannot be sent."""

    def refuse(_: Frame, number: int, error: Exception) -> None:
        refused = UnsendableError(f"An input cannot be sent to the engine process: {reason_of(error)}")
        refused.__cause__ = error
        failed(number, refused)

    return frames_of(_alike(rows), _encode, refuse, halves)


def _alike(rows: Iterable[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """Yield neighbours that may be one part."""
    encoded: dict[int, tuple[Sequence[PoolingParams], bytes | None]] = {}
    """Params by ``id``, kept alive, and the bytes by which they are compared: comparing them may do anything."""

    def in_common(row: NumberedRow) -> tuple[Any, ...]:
        number, request = row
        params, prompt = request.params, request.prompt
        if id(params) not in encoded:
            encoded[id(params)] = params, _encoded(params)
        _, of_params = encoded[id(params)]
        is_alone = _has_optional_arrays(prompt) or of_params is None
        return of_params, prompt.type_ids is None, prompt.kept is None, number if is_alone else None

    for _, alike in itertools.groupby(rows, in_common):
        while some := [*itertools.islice(alike, FULL_FRAME_ROWS)]:
            yield some


def _has_optional_arrays(prompt: RenderedPrompt) -> bool:
    return prompt.embeds is not None or prompt.images is not None or prompt.chunks is not None


def _encoded(params: Sequence[PoolingParams]) -> bytes | None:
    buffers: list[Buffer] = []
    try:
        return b"".join([_encode_params(params, buffers), *buffers])
    except Exception:  # the row will fail for it
        return None


def _encode_params(params: Sequence[PoolingParams], buffers: list[Buffer]) -> msgspec.Raw:
    """Encode params as in ``Rows``, and add their arrays to ``buffers``. Raises what msgspec raises."""

    def header(value: object) -> ArrayHeader:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} has no form in msgpack")
        return put(value, buffers)

    named = [(param.wire_name, param) for param in params]
    return msgspec.Raw(msgspec.msgpack.encode(named, enc_hook=header))


def _encode(requests: Sequence[PoolingRequest]) -> tuple[Rows, list[Buffer]]:
    prompts = [request.prompt for request in requests]
    prompt, lengths = prompts[0], [len(prompt.token_ids) for prompt in prompts]
    if not fits_in_part(len(requests), INT32.itemsize * sum(lengths)):
        raise ValueError("too many rows for one part")
    buffers = [buffer_of_rows([prompt.token_ids for prompt in prompts], INT32, lengths)]
    names = tuple([name for name in TOKEN_ARRAYS if getattr(prompt, name) is not None])
    buffers += [
        buffer_of_rows([getattr(each, name) for each in prompts], TOKEN_ARRAYS[name], lengths) for name in names
    ]
    optional_arrays = _optional_arrays(prompt, buffers)
    instruction_tokens = _column([prompt.instruction_tokens for prompt in prompts])
    attended = _column([prompt.attended for prompt in prompts])
    params: Any = _encode_params(requests[0].params, buffers)
    return Rows(lengths, params, instruction_tokens, attended, names, optional_arrays), buffers


def _column(values: list[T]) -> list[T]:
    return values[:1] if len({*values}) == 1 else values


def _optional_arrays(prompt: RenderedPrompt, buffers: list[Buffer]) -> OptionalArrays | None:
    if not _has_optional_arrays(prompt):
        return None
    embeds, chunks, images = prompt.embeds, prompt.chunks, prompt.images
    return OptionalArrays(
        None if embeds is None else put(embeds, buffers),
        None if chunks is None else put(chunks, buffers),
        None if images is None else [(name, put(array, buffers)) for name, array in images.arrays.items()],
        () if images is None else images.tokens,
    )


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
    if not rows.token_arrays and rows.optional_arrays is None:  # as most are
        none = itertools.repeat(None, count)
        return [*itertools.starmap(RenderedPrompt, zip(ids, instruction_tokens, none, attended, strict=True))]
    arrays = {
        name: pieces(payload.take((TOKEN_ARRAYS[name].str, (total,))), rows.lengths) for name in rows.token_arrays
    }
    type_ids, kept = [arrays.get(name, [None] * count) for name in TOKEN_ARRAYS]
    of_one = [[each] * count for each in _read_optional_arrays(rows, payload)]
    columns = zip(ids, instruction_tokens, type_ids, attended, kept, *of_one, strict=True)
    return [*itertools.starmap(RenderedPrompt, columns)]


def _require_within(lengths: Sequence[int], *counts: Sequence[int | None]) -> None:
    """Raise ``ValueError`` for numbers of a row's tokens that it does not have: on a GPU they would be addresses."""
    for column in counts:
        if column.count(column[0]) == len(column) and not column[0]:  # nothing is said of any row
            continue
        if any(count is not None and not 0 <= count <= length for count, length in zip(column, lengths, strict=True)):
            raise ValueError("a row has fewer tokens than are said of it")


def _of_each(column: list[T], count: int) -> list[T]:
    return column * count if len(column) == 1 else column


def _read_optional_arrays(rows: Rows, payload: Payload) -> tuple[ImageFeatures | None, Array | None, Array | None]:
    """Return images, token embeddings and chunks."""
    headers = rows.optional_arrays
    if headers is None:
        return None, None, None
    if len(rows.lengths) != 1:
        raise ValueError("only a row that is alone has these arrays")
    embeds = None if headers.embeds is None else payload.take(headers.embeds)
    if embeds is not None and (embeds.ndim != 2 or len(embeds) != rows.lengths[0]):
        raise ValueError("token embeddings are not one for each token")
    chunks = None if headers.chunks is None else payload.take(headers.chunks)
    if chunks is not None:
        _require_chunks(chunks, rows.lengths[0])
    if headers.images is None:
        return None, embeds, chunks
    arrays = {name: payload.take(header) for name, header in headers.images}
    return ImageFeatures(arrays, headers.image_tokens), embeds, chunks


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

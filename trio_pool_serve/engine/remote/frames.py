"""Frames of rows or answers, and the arrays in them.

A frame has parts that are encoded separately, so that a part which cannot be sent or read fails alone. Rows or answers
that have everything in common but their numbers are one part; how many fit into one is found by trying: see
``frames_of``. Dtypes and shapes of arrays are in the message, their bytes in the frame's payload: in the order of the
parts, and within a part in the order of the message's fields.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from attrs import define, field

from trio_pool_serve.engine.remote.wire import FULL_FRAME_ROWS, Array, Outputs, Part, Rows
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer

T = TypeVar("T")

FULL_FRAME_BYTES = 2**20
"""A frame with this many bytes of arrays, or with ``FULL_FRAME_ROWS``, is sent before more is added: the receiver can
begin, and no more is copied at once."""

MAX_PART_BYTES = MAX_HEADER_BYTES // FULL_FRAME_ROWS // 2
"""Maximum size of a part without arrays and ``BYTES_OF_ROW``, so that a full frame's parts fit into a header."""

BYTES_OF_ROW = 256
"""Maximum bytes of a part for each further row: numbers of up to nine bytes."""

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)

MAX_DIMENSIONS = 8
"""Maximum dimensions of an array, and characters of its dtype: numpy would spend seconds on a long one."""

NUMBERS = "biuf"
"""The kinds of dtypes that are sent: booleans, integers and floats."""


def require_valid(is_valid: bool, otherwise: str) -> None:  # noqa: FBT001  (as an assertion)
    """Raise ``ValueError`` with this message if something that is to be sent or was received is not valid."""
    if not is_valid:
        raise ValueError(otherwise)


class ArrayHeader(msgspec.Struct, array_like=True):
    """Stands for an array in a message."""

    kind: str
    """Its ``dtype.str``."""
    shape: tuple[int, ...]


def encode(content: object, buffers: list[Buffer]) -> bytes:
    """Encode a message, and add the bytes of its arrays to ``buffers``. Raises what msgspec raises."""

    def header_of(value: object) -> ArrayHeader:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in NUMBERS:
            raise TypeError(f"a {type(value).__name__} has no form in msgpack")
        # Copied only if they are not contiguous. An empty array cannot be viewed as bytes.
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b"")
        return ArrayHeader(value.dtype.str, value.shape)

    return msgspec.msgpack.encode(content, enc_hook=header_of)


def concatenated(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Concatenate arrays; a single contiguous array is not copied.

    Raises ``TypeError`` if the values are not of ``dtype``'s kind.
    """
    if len(arrays) > 1:
        return np.concatenate(arrays, dtype=dtype, casting="same_kind")
    return np.ascontiguousarray(arrays[0].astype(dtype, copy=False, casting="same_kind"))


def of_rows(arrays: Sequence[Any], dtype: np.dtype[Any], lengths: Sequence[int]) -> Array:
    """Concatenate rows' arrays, each of shape (its length,).

    Raises ``ValueError`` for arrays of other shapes, and as ``concatenated``.
    """
    together = concatenated(arrays, dtype)
    require_valid(
        together.shape == (sum(lengths),) and [*map(len, arrays)] == [*lengths],
        "an array whose length differs from its row's",
    )
    return together


def pieces(array: Array, dtype: np.dtype[Any], lengths: Sequence[int], *shape: int) -> list[Array]:
    """Split an array between rows: each gets a piece of shape (its length, ``*shape``), which shares the memory.

    Raises ``ValueError`` for an array of another dtype or shape.
    """
    if array.dtype != dtype or array.shape != (sum(lengths), *shape):
        raise ValueError(f"{array.dtype} of shape {array.shape} where {sum(lengths)} of {dtype} are expected")
    if len({*lengths}) == 1:
        return list(array.reshape(len(lengths), lengths[0], *shape))
    return [array[end - length : end] for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]


@define(eq=False)
class Frame:
    """Rows or answers that are sent together, with their arrays."""

    parts: list[Part] = field(init=False, factory=list)
    buffers: list[Buffer] = field(init=False, factory=list)
    _rows: int = field(init=False, default=0)
    _nbytes: int = field(init=False, default=0)

    def add(self, ids: list[int], content: Rows | Outputs) -> None:
        """Add rows or their outcome. Raises what msgspec raises, and ``ValueError`` if the part is too large."""
        buffers: list[Buffer] = []
        encoded = encode(content, buffers)
        nbytes = sum(map(len, buffers))
        require_valid(
            len(encoded) <= _max_bytes(len(ids)) and nbytes <= MAX_PAYLOAD_BYTES - FULL_FRAME_BYTES,
            f"{len(encoded)} and {nbytes} bytes are too many",
        )
        self.parts.append(Part(ids, nbytes, msgspec.Raw(encoded)))
        self.buffers += buffers
        self._rows += len(ids)
        self._nbytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether it is sent before more is added."""
        return self._rows >= FULL_FRAME_ROWS or self._nbytes >= FULL_FRAME_BYTES


def frames_of(
    groups: Iterable[Sequence[tuple[int, T]]],
    content_of: Callable[[list[T]], Rows | Outputs],
    refuse: Callable[[Frame, int, Exception], None],
    kind_of: Callable[[tuple[int, T]], object] = lambda _: None,
) -> Iterator[Frame]:
    """Yield frames with numbered rows or outcomes: each group in as few parts as possible.

    A group that cannot be one part is divided by ``kind_of`` its items, and in halves if all are of the same kind: one
    of the items may be guilty, or there are too many. ``refuse`` is called with the number of an item that cannot be
    sent even alone, and with the error.
    """
    frame = Frame()
    for group in groups:
        left = [group[begin : begin + FULL_FRAME_ROWS] for begin in reversed(range(0, len(group), FULL_FRAME_ROWS))]
        while left:
            together = left.pop()
            try:
                frame.add([number for number, _ in together], content_of([each for _, each in together]))
            except Exception as error:  # fields of params may be of any type, and heads may return anything
                if len(together) > 1:
                    left += reversed(_divided(together, kind_of))
                else:
                    refuse(frame, together[0][0], error)
            if frame.is_full:
                yield frame
                frame = Frame()
    if frame.parts:
        yield frame


def _divided(group: Sequence[T], kind_of: Callable[[T], object]) -> Sequence[Sequence[T]]:
    kinds, middle = dict[object, list[T]](), len(group) // 2
    for item in group:
        kinds.setdefault(kind_of(item), []).append(item)
    return [*kinds.values()] if len(kinds) > 1 else [group[:middle], group[middle:]]


def reason_of(error: Exception) -> str:
    """Return an error's class and message, even if reading the message raises."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: Exception) -> str:
    """Return an error's message, even if reading it raises."""
    try:
        return str(error)
    except Exception:  # a plugin's class
        return "its message cannot be read"


def _max_bytes(rows: int) -> int:
    """Return the maximum bytes of a part with ``rows`` rows, without its arrays."""
    return MAX_PART_BYTES + BYTES_OF_ROW * (rows - 1)


def require_one_part(rows: int, nbytes: int) -> None:
    """Raise ``ValueError`` if rows with ``nbytes`` bytes of arrays are too many for one part; a single row never is."""
    require_valid(rows <= 1 or nbytes <= FULL_FRAME_BYTES, f"{rows} rows with {nbytes} bytes are too many for one part")


@define(eq=False)
class ReceivedPart:
    """A part of a frame, and its bytes of the frame's payload, whose memory the decoded arrays share."""

    content: Buffer | msgspec.Raw
    payload: memoryview
    """The bytes of the arrays; some may be missing."""
    ids: list[int]
    _taken: int = field(default=0, init=False)

    def decode(self, kind: type[T]) -> T:
        """Return the content as a ``kind``. Raises what msgspec raises.

        Raises ``ValueError`` if arrays are invalid or incomplete, or if the content is larger than any that is sent,
        which would take seconds.
        """
        nbytes = memoryview(self.content).nbytes
        require_valid(nbytes <= _max_bytes(len(self.ids)), f"{nbytes} bytes for {len(self.ids)} rows are too many")
        return msgspec.msgpack.decode(self.content, type=kind, dec_hook=self._next_array)

    def convert(self, fields: Any, kind: type[T]) -> T:
        """Return fields that ``decode`` has left unconverted as a ``kind``, with the next arrays. Raises likewise."""
        return msgspec.convert(fields, kind, dec_hook=self._next_array)

    def _next_array(self, _: object, fields: Any) -> Array:
        header = msgspec.convert(fields, ArrayHeader)
        kind, shape = header.kind, header.shape
        require_valid(
            max(len(kind), len(shape)) <= MAX_DIMENSIONS,
            f"an array of {len(shape)} dimensions, or of a type with {len(kind)} characters",
        )
        dtype = np.dtype(kind)
        count, left = math.prod(shape), len(self.payload) - self._taken
        require_valid(
            dtype.kind in NUMBERS and min(shape, default=0) >= 0 and count * dtype.itemsize <= left,
            f"an array {kind} of shape {shape} cannot be sent, or is incomplete",
        )
        array = np.frombuffer(self.payload, dtype, count, self._taken).reshape(shape)
        self._taken += array.nbytes
        return array


def received_parts(parts: Sequence[Part], payload: memoryview) -> Iterator[ReceivedPart]:
    """Yield the parts of a frame."""
    for part, end in zip(parts, itertools.accumulate(part.nbytes for part in parts), strict=True):
        yield ReceivedPart(part.content, payload[end - part.nbytes : end], part.ids)

"""Messages with arrays: their dtypes and shapes are part of the message, their bytes are in its payload.

The payload has the arrays in the order of the message's fields: in that order they are put in and taken out.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.processes.framed_stream import Buffer

Array: TypeAlias = npt.NDArray[Any]

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)

MAX_KIND = 8

MAX_DIMENSIONS = 8

NUMBERS = "biuf"
"""The kinds of dtypes that are sent: booleans, integers and floats."""


class ArrayHeader(msgspec.Struct, array_like=True):
    """What a message has in place of an array."""

    kind: str
    """Its ``dtype.str``."""
    shape: tuple[int, ...]


def encode(content: object, buffers: list[Buffer]) -> bytes:
    """Encode a message, and add the bytes of its arrays to ``buffers``. Raises what msgspec raises."""

    def header_of(value: object) -> ArrayHeader:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in NUMBERS:
            raise TypeError(f"a {type(value).__name__} has no form in msgpack")
        buffers.append(buffer_of(value))
        return ArrayHeader(value.dtype.str, value.shape)

    return msgspec.msgpack.encode(content, enc_hook=header_of)


def buffer_of(array: Array) -> Buffer:
    """Return an array's bytes, copied only if they are not contiguous."""
    if array.size and array.flags.c_contiguous and array.dtype.isnative:
        return array.data.cast("B")
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""  # type: ignore[arg-type]


@define(eq=False)
class Received:
    """An encoded message and its payload, whose memory the decoded arrays share."""

    content: Buffer | msgspec.Raw
    payload: memoryview
    """The bytes of the arrays; some may be missing."""
    _taken: int = field(default=0, init=False)

    def decode(self, kind: Any) -> Any:
        """Return the message, of type ``kind``. Raises what msgspec and ``take`` raise."""
        return msgspec.msgpack.decode(self.content, type=kind, dec_hook=self._array)

    def convert(self, fields: Any, kind: Any) -> Any:
        """Return what ``decode`` has left as it came, as a ``kind``, with the next arrays. Raises as ``decode``."""
        return msgspec.convert(fields, kind, dec_hook=self._array)

    def _array(self, _: object, header: Any) -> Array:
        return self.take(msgspec.convert(header, ArrayHeader))

    def take(self, header: ArrayHeader) -> Array:
        """Return the next array. Raises ``ValueError`` if bytes are missing."""
        kind, shape = header.kind, header.shape
        if len(kind) > MAX_KIND or len(shape) > MAX_DIMENSIONS:  # numpy would spend seconds on a long one
            raise ValueError(f"an array of {len(shape)} dimensions, or of a type with {len(kind)} characters")
        dtype = np.dtype(kind)
        count, left = math.prod(shape), len(self.payload) - self._taken
        if dtype.kind not in NUMBERS or min(shape, default=0) < 0 or count * dtype.itemsize > left:
            raise ValueError(f"an array {kind} of shape {shape} cannot be sent, or is incomplete")
        array = np.frombuffer(self.payload, dtype, count, self._taken).reshape(shape)
        self._taken += array.nbytes
        return array


def concatenated(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return several arrays one behind the other, contiguous; a single one is not copied.

    Raises ``TypeError`` for values of another kind than ``dtype``'s.
    """
    if len(arrays) > 1:
        return np.concatenate(arrays, dtype=dtype, casting="same_kind")
    array = arrays[0]
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array.astype(dtype, copy=False, casting="same_kind"))


def of_rows(arrays: Sequence[Any], dtype: np.dtype[Any], lengths: Sequence[int]) -> Array:
    """Return rows' arrays, each of shape (its length,), one behind the other.

    Raises ``ValueError`` for arrays of other shapes, and as ``concatenated``.
    """
    together = concatenated(arrays, dtype)
    if together.shape != (sum(lengths),) or [*map(len, arrays)] != [*lengths]:
        raise ValueError("an array of another length than its row")
    return together


def pieces(array: Array, dtype: np.dtype[Any], lengths: Sequence[int], *shape: int) -> list[Array]:
    """Divide an array between rows: each gets a piece of shape (its length, ``*shape``), which shares the memory.

    Raises ``ValueError`` for an array of another dtype or shape.
    """
    if array.dtype != dtype or array.shape != (sum(lengths), *shape):
        raise ValueError(f"{array.dtype} of shape {array.shape} where {sum(lengths)} of {dtype} are expected")
    if len(lengths) == 1:
        return [array]
    if len({*lengths}) == 1:
        return list(array.reshape(len(lengths), lengths[0], *shape))
    ends = list(itertools.accumulate(lengths))
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]

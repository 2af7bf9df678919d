"""Arrays sent with a message between processes: dtypes and shapes in the message, raw bytes in its payload."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.processes.framed_stream import Buffer

Array: TypeAlias = npt.NDArray[Any]

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)

MAX_KIND = 8

MAX_DIMENSIONS = 8

ArrayHeader: TypeAlias = tuple[str, tuple[int, ...]]
"""An array's ``dtype.str`` and shape."""


@define(eq=False)
class Payload:
    """The bytes of the arrays of one part, in order; ``take`` returns the next array."""

    view: memoryview
    _taken: int = field(default=0, init=False)

    def take(self, header: ArrayHeader) -> Array:
        """Return the next array, which shares the payload's memory. Raises ``ValueError`` if bytes are missing."""
        kind, shape = header
        if len(kind) > MAX_KIND or len(shape) > MAX_DIMENSIONS:  # numpy would spend seconds on a long one
            raise ValueError(f"an array of {len(shape)} dimensions, or of a type with {len(kind)} characters")
        dtype = np.dtype(kind)
        count = math.prod(shape)
        if (
            dtype.kind not in "biuf"
            or min(shape, default=0) < 0
            or self._taken + count * dtype.itemsize > len(self.view)
        ):
            raise ValueError(f"an array {kind} of shape {shape} cannot be sent, or is incomplete")
        array = np.frombuffer(self.view, dtype, count, self._taken).reshape(shape)
        self._taken += array.nbytes
        return array


def put(array: Array, buffers: list[Buffer]) -> ArrayHeader:
    """Add an array's bytes to the buffers of a part; return what ``Payload.take`` needs to take it out again."""
    buffers.append(buffer_of(array))
    return array.dtype.str, array.shape


def buffer_of(array: Array) -> Buffer:
    """Return an array's bytes, copied only if they are not contiguous."""
    if array.size and array.flags.c_contiguous and array.dtype.isnative:
        return array.data.cast("B")
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""  # type: ignore[arg-type]


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


def buffer_of_rows(arrays: Sequence[Array], dtype: np.dtype[Any], lengths: Sequence[int]) -> Buffer:
    """Return the bytes of rows' arrays, each of shape (its length,), one behind the other.

    Raises ``ValueError`` for arrays of other shapes, and as ``concatenated``.
    """
    together = concatenated(arrays, dtype)
    if together.shape != (sum(lengths),) or [*map(len, arrays)] != [*lengths]:
        raise ValueError("an array of another length than its row")
    return buffer_of(together)


def pieces(array: Array, lengths: Sequence[int]) -> list[Array]:
    """Divide an array along its first axis; the pieces share its memory."""
    if len(lengths) == 1:
        return [array]
    if len({*lengths}) == 1:
        return list(array.reshape(len(lengths), lengths[0], *array.shape[1:]))
    ends = list(itertools.accumulate(lengths))
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]

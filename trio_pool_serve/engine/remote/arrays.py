"""Arrays sent with a message between processes: dtypes and shapes in the message, raw bytes in its payload."""

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.processes.framed_stream import Buffer

Array: TypeAlias = npt.NDArray[Any]

ArrayHeader: TypeAlias = tuple[str, tuple[int, ...]]
"""An array's ``dtype.str`` and shape."""


@define(eq=False)
class Payload:
    """The bytes of one row's or answer's arrays, in order; ``take`` returns the next array."""

    view: memoryview
    _taken: int = field(default=0, init=False)

    def take(self, header: ArrayHeader) -> Array:
        """Return the next array, which shares the payload's memory. Raises ``ValueError`` if bytes are missing."""
        kind, shape = header
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


def header_of(array: Array) -> ArrayHeader:
    """Return the dtype and shape of an array, for ``Payload.take``."""
    return array.dtype.str, array.shape


def buffer_of(array: Array) -> Buffer:
    """Return an array's bytes, copied only if they are not contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""  # type: ignore[arg-type]

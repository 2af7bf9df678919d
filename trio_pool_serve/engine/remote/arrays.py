"""Arrays behind a message between processes: raw bytes there, their types and shapes in the message."""

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.processes.framed_stream import Buffer

Array: TypeAlias = npt.NDArray[Any]

ArrayHeader: TypeAlias = tuple[str, tuple[int, ...]]
"""An array's dtype, as ``dtype.str`` writes it, and its shape."""


@define(eq=False)
class Payload:
    """The arrays of one row or answer, in the order in which they are taken."""

    view: memoryview
    _taken: int = field(default=0, init=False)

    def take(self, described: ArrayHeader) -> Array:
        """Return the next array, which shares the payload's memory. Raises ``ValueError`` if it is not there."""
        kind, shape = described
        dtype = np.dtype(kind)
        count = math.prod(shape)
        if (
            dtype.kind not in "biuf"
            or min(shape, default=0) < 0
            or self._taken + count * dtype.itemsize > len(self.view)
        ):
            raise ValueError(f"an array {kind} of shape {shape} cannot be sent, or is not all there")
        array = np.frombuffer(self.view, dtype, count, self._taken).reshape(shape)
        self._taken += array.nbytes
        return array


def described(array: Array) -> ArrayHeader:
    """Return what ``Payload.take`` asks for."""
    return array.dtype.str, array.shape


def buffer_of(array: Array) -> Buffer:
    """Return an array's bytes, copied only if they do not lie together."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""  # type: ignore[arg-type]

"""The columns of an output: their names, and what a value of each is in memory and in files.

Every value may be None, for a row without a result.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import frozen

VectorDtype: TypeAlias = Literal["float32", "float16", "int8", "uint8"]


@frozen
class StringType:
    """A ``str``, or for ids any JSON scalar; in Arrow a string."""


@frozen
class NumberType:
    """A number, written as float32."""


@frozen
class VectorType:
    """An array ``[length]``; in Arrow a list of fixed size, in text a list."""

    length: int
    dtype: VectorDtype = "float32"


@frozen
class NumberListType:
    """An array or list of any length, written as float32."""


@frozen
class VectorListType:
    """An array ``[n, length]``, where n differs between rows: one vector for each token."""

    length: int
    dtype: VectorDtype = "float32"


@frozen
class SparseType:
    """A pair of arrays, indices and scores; in files a list of ``{index: int32, score: float32}``."""


ColumnType: TypeAlias = StringType | NumberType | VectorType | NumberListType | VectorListType | SparseType


@frozen
class OutputColumn:
    """A column by its name in the file."""

    name: str
    type: ColumnType


def as_written(kind: ColumnType, value: Any) -> Any:
    """Return the contiguous arrays for a value that is not None; strings, ids and numbers as they are.

    Raises ``ValueError`` for an array of another shape.
    """
    match kind:
        case VectorType(length, dtype):
            return _shaped(value, dtype, (length,))
        case VectorListType(length, dtype):
            array = np.ascontiguousarray(value, dtype)
            return _shaped(array, dtype, (len(array), length))
        case NumberListType():
            return np.ascontiguousarray(value, np.float32)
        case SparseType():
            indices, scores = value
            return np.ascontiguousarray(indices, np.int32), _shaped(scores, "float32", (len(indices),))
    return value


def size_of(value: Any) -> int:
    """Return about how many bytes a value has in memory."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    return 8


def _shaped(value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    array = np.ascontiguousarray(value, dtype)
    if array.shape != shape:
        raise ValueError(f"An array of shape {array.shape}, where one of {shape} is written.")
    return array

"""Values of columns as numpy arrays of the type that is written."""

from typing import Any

import numpy as np

from trio_pool_serve.bulk.outputs.column_types import (
    ColumnType,
    IntegerListType,
    NumberListType,
    SparseType,
    VectorListType,
    VectorType,
)


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
        case IntegerListType():
            return np.ascontiguousarray(value, np.int32)
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

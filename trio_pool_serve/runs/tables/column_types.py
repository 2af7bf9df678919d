"""The columns of an output: their names, and what a value of each is in memory and in files."""

from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import frozen

ColumnType: TypeAlias = Literal["string", "number", "numbers", "vector", "vectors", "sparse"]
"""What a value is; it may be None, for a row without a result.

string: a ``str``, or for ids any JSON scalar; in Arrow a string. number: written as float32. numbers: an array or list
of any length, written as float32. vector: an array ``[length]``; in Arrow a list of fixed size, in text a list.
vectors: an array ``[n, length]``, where n differs between rows: one vector for each token. sparse: a pair of arrays,
indices and scores; in files a list of ``{index: int32, score: float32}``.
"""

VectorDtype: TypeAlias = Literal["float32", "float16", "int8", "uint8"]


@frozen
class OutputColumn:
    """A column by its name in the file; ``length`` and ``dtype`` are for vectors."""

    name: str
    type: ColumnType
    length: int = 0
    dtype: VectorDtype = "float32"


def as_written(column: OutputColumn, value: Any) -> Any:
    """Return the contiguous arrays for a value that is not None; strings, ids and numbers as they are.

    Raises ``ValueError`` for an array of another shape.
    """
    match column.type:
        case "vector":
            return _shaped(value, column.dtype, (column.length,))
        case "vectors":
            return _shaped(value, column.dtype, (len(value), column.length))
        case "numbers":
            return np.ascontiguousarray(value, np.float32)
        case "sparse":
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

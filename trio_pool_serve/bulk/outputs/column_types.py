"""The columns of an output: their names, and what a value of each is in memory and in files.

Every value may be None, for a row without a result.
"""

from typing import Literal, TypeAlias

from attrs import frozen

VectorDtype: TypeAlias = Literal["float32", "float16", "int8", "uint8"]


@frozen
class StringType:
    """A ``str``."""


@frozen
class IdType:
    """An id, a JSON scalar; in Arrow a string."""


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
class IntegerListType:
    """An array or list of any length, written as int32."""


@frozen
class StringListType:
    """A list of ``str``."""


@frozen
class VectorListType:
    """An array ``[n, length]``, where n differs between rows: one vector for each token."""

    length: int
    dtype: VectorDtype = "float32"


@frozen
class SparseType:
    """A pair of arrays, indices and scores; in files a list of ``{index: int32, score: float32}``."""


ColumnType: TypeAlias = (
    StringType
    | IdType
    | NumberType
    | VectorType
    | NumberListType
    | IntegerListType
    | StringListType
    | VectorListType
    | SparseType
)


@frozen
class OutputColumn:
    """A column by its name in the file."""

    name: str
    type: ColumnType

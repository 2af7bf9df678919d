"""What the commands for files compute: the columns of their outputs."""

from typing import Any

from trio_pool_serve.bulk.bulk_options import TaskOptions
from trio_pool_serve.bulk.outputs.column_types import (
    NumberListType,
    NumberType,
    OutputColumn,
    SparseType,
    StringType,
    VectorDtype,
    VectorListType,
    VectorType,
)
from trio_pool_serve.errors import BulkInputError, InvalidRequestError


def text_in(value: Any, column: str) -> str:
    """Return the text of a column. Raises ``InvalidRequestError`` for other values."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"The column {column} is not a text.")
    return value


def columns_of(task: TaskOptions, dimensions: int) -> list[OutputColumn]:
    """Return the columns of the output after the id, for a model with vectors of that length.

    Raises ``BulkInputError``.
    """
    match task.task:
        case "embed" | "token-embed":
            name = "embedding" if task.task == "embed" else "embeddings"
            return [OutputColumn(name, _vector_type(task, task.dimensions or dimensions))]
        case "sparse":
            return [OutputColumn("sparse_embedding", SparseType())]
        case "classify":
            return [
                OutputColumn("label", StringType()),
                OutputColumn("score", NumberType()),
                OutputColumn("probabilities", NumberListType()),
            ]
        case "score":
            return [OutputColumn("score", NumberType())]
        case _:
            return [OutputColumn("results", SparseType())]


def _vector_type(task: TaskOptions, length: int) -> VectorType | VectorListType:
    dtype: VectorDtype = "int8" if task.dtype == "binary" else task.dtype
    if task.dtype == "binary":
        if length % 8:
            raise BulkInputError(f"--dtype binary needs a multiple of 8 dimensions, not {length}.")
        length //= 8
    return VectorType(length, dtype) if task.task == "embed" else VectorListType(length, dtype)

"""The results of rows, what computes them a window at a time, and the columns of outputs."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import trio

from trio_pool_serve.bulk.bulk_options import TaskOptions
from trio_pool_serve.errors import (
    BulkInputError,
    InvalidRequestError,
    PoolServeError,
    UnavailableError,
    unwrap_exception_groups,
)
from trio_pool_serve.runs.run import Computer, WindowResult
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import OutputColumn, VectorDtype
from trio_pool_serve.runs.tables.table_run import RowResult


def parts_of(rows: Sequence[InputRow], size: int) -> list[Sequence[InputRow]]:
    """Return rows in parts of at most ``size``."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


async def compute_parts(
    count: int, compute: Callable[[int], Awaitable[WindowResult[RowResult]]]
) -> WindowResult[RowResult]:
    """Return the results of consecutive parts, computed at the same time, as one.

    Raises what ``compute(index)`` raises. Cancellation: as its own.
    """
    results = [WindowResult[RowResult]([])] * count

    async def compute_part(index: int) -> None:
        results[index] = await compute(index)

    with unwrap_exception_groups(PoolServeError):
        async with trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(compute_part, index)
    return WindowResult.joined(results)


ComputeValues: TypeAlias = Callable[[Sequence[tuple[Any, ...]]], Awaitable[tuple[list[tuple[Any, ...]], int]]]
"""Returns the output's values for rows with these input values, and the number of tokens computed."""


async def compute_halving(
    rows: Sequence[InputRow], compute: ComputeValues, faults: tuple[type[PoolServeError], ...]
) -> WindowResult[RowResult]:
    """Compute rows; if that fails with one of the ``faults``, both halves, down to the row at fault.

    Raises ``UnavailableError``, and what ``compute`` raises besides ``faults``. Cancellation: as its own.
    """
    try:
        values, tokens = await compute([row.values for row in rows])
    except UnavailableError:
        raise
    except faults as error:
        if len(rows) == 1:
            return WindowResult([RowResult(error=str(error))])
    else:
        return WindowResult([RowResult(of_row) for of_row in values], tokens)
    middle = len(rows) // 2
    return WindowResult.joined(
        [await compute_halving(half, compute, faults) for half in (rows[:middle], rows[middle:])]
    )


class TableComputer(Computer[InputRow, RowResult]):
    """Computes rows of a table: with a model in this process, or by a server."""

    columns: Sequence[OutputColumn]
    """The columns of the output for ``RowResult.values``."""
    model: dict[str, str]
    """Properties that decide the numbers, by name; the journal keeps them."""

    def refused(self, row: InputRow) -> RowResult:
        """Return the error of a row."""
        return RowResult(error=row.error)

    def died(self, row: InputRow) -> RowResult:
        """Return the error of a row that ends engine processes."""
        del row
        return RowResult(error="The engine died while it computed this row.")


OpenComputer: TypeAlias = Callable[[], AbstractAsyncContextManager[TableComputer]]


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
        case "embed":
            return [OutputColumn("embedding", "vector", *_length_and_dtype(task, dimensions))]
        case "token-embed":
            return [OutputColumn("embeddings", "vectors", *_length_and_dtype(task, dimensions))]
        case "sparse":
            return [OutputColumn("sparse_embedding", "sparse")]
        case "classify":
            return [
                OutputColumn("label", "string"),
                OutputColumn("score", "number"),
                OutputColumn("probabilities", "numbers"),
            ]
        case "score":
            return [OutputColumn("score", "number")]
        case _:
            return [OutputColumn("results", "sparse")]


def _length_and_dtype(task: TaskOptions, dimensions: int) -> tuple[int, VectorDtype]:
    length = task.dimensions or dimensions
    if task.dtype != "binary":
        return length, task.dtype
    if length % 8:
        raise BulkInputError(f"--dtype binary needs a multiple of 8 dimensions, not {length}.")
    return length // 8, "int8"

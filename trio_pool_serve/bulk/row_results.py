"""The results of rows, what computes them a window at a time, and the columns of outputs."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import msgspec
import trio
from attrs import frozen

from trio_pool_serve.bulk.bulk_options import TaskOptions
from trio_pool_serve.errors import BulkInputError, InvalidRequestError
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import OutputColumn, VectorDtype


class RowResult(msgspec.Struct, frozen=True):
    """The values of the output's columns for a row, after the id; or the error that it failed with."""

    values: tuple[Any, ...] = ()
    error: str = ""


@frozen(eq=False)
class WindowResult:
    """The results of a window's rows, in their order, and the tokens that were computed."""

    rows: list[RowResult]
    tokens: int

    @classmethod
    def joined(cls, parts: Sequence["WindowResult"]) -> "WindowResult":
        """Return the results of consecutive parts as one."""
        return cls([row for part in parts for row in part.rows], sum(part.tokens for part in parts))


def parts_of(rows: Sequence[InputRow], size: int) -> list[Sequence[InputRow]]:
    """Return rows in parts of at most ``size``."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


async def compute_parts(count: int, compute: Callable[[int], Awaitable[WindowResult]]) -> WindowResult:
    """Return the results of consecutive parts, computed at the same time, as one.

    Raises what ``compute(index)`` raises, in a group. Cancellation: as its own.
    """
    results = [WindowResult([], 0)] * count

    async def compute_part(index: int) -> None:
        results[index] = await compute(index)

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(compute_part, index)
    return WindowResult.joined(results)


class Computer(Protocol):
    """Computes rows: with a model in this process, or by a server."""

    columns: Sequence[OutputColumn]
    """Those of ``RowResult.values``."""
    model: dict[str, str]
    """What the numbers depend on, by name."""

    async def compute(self, rows: Sequence[InputRow]) -> WindowResult:
        """Compute a window. With a model of this process, the same rows give the same bytes.

        Raises ``PoolServeError`` if the run cannot go on. Cancellation: at once.
        """


OpenComputer: TypeAlias = Callable[[], AbstractAsyncContextManager[Computer]]


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

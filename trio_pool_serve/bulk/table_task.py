"""The tasks of the commands for tables, and the interface by which a model here or a server computes rows."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pybase64
import trio
from attrs import define, field, frozen
from attrs.validators import in_

from trio_pool_serve.api.fields.encodings import as_dtype
from trio_pool_serve.bulk.bulk_options import TextOptions, VectorFormat
from trio_pool_serve.errors import (
    BulkInputError,
    PoolServeError,
    UnavailableError,
    require,
    require_request,
    unwrap_exception_groups,
)
from trio_pool_serve.runs.run import Computer, WindowResult
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import ColumnType, OutputColumn, RowResult
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PoolingTask

TaskName: TypeAlias = Literal["embed", "token-embed", "sparse", "classify", "score", "rerank"]

Values: TypeAlias = tuple[Any, ...]
"""One value for each column."""

SAMPLE = "Every task has a parent, every wait can be cancelled, and every failure has somewhere to go. " * 11
"""A thousand characters."""


@frozen(kw_only=True)
class TableTask:
    """A task of the commands for tables."""

    model_task: PoolingTask
    """The task that a model must support."""
    columns: tuple[str, ...] = ("text",)
    """The columns of the input, by their default names."""
    results: Sequence[tuple[str, ColumnType]]
    """The columns of the output after the id, in the order of ``RowResult.values``."""
    of_output: Callable[[Model, Any], Values] = lambda _, output: (output,)
    """Returns the values of the results for a model's output."""
    path: str
    """The route of a server."""
    fields: Callable[..., dict[str, Any]]
    """Returns the fields of a request with the texts of each column."""
    of_item: Callable[[Any], Values]
    """Returns the values of the results for an item of a response."""
    is_ranking: bool = False
    """Whether the second column has lists of texts: then each row is a request of its own."""
    example: Values = ("a",)
    """A short row: options with which it fails are wrong for all rows."""
    sample: Sequence[Values] = tuple([(SAMPLE[:length],) for length in (20, 100, 1000)])
    """Rows whose results show whether a model still computes the same."""

    @property
    def n_axes(self) -> int:
        """The number of axes of an array of vectors: 1, 2 if each token has one, 0 for other results."""
        return {"vector": 1, "vectors": 2}.get(self.results[0][1], 0)


def _vector(embedding: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a vector that is base64 of float32, or a list of numbers from a server without base64."""
    if isinstance(embedding, str):
        return np.frombuffer(pybase64.b64decode(embedding, validate=True), np.dtype("<f4"))
    return np.array(embedding, np.float32)


def _scored(items: list[dict[str, Any]], name: str) -> tuple[Any, Any]:
    """Return the indices of items, and the numbers in their field ``name``."""
    indices = np.array([item["index"] for item in items], np.int32)
    return indices, np.array([item[name] for item in items], np.float32)


TABLE_TASKS: Mapping[TaskName, TableTask] = {
    "embed": TableTask(
        model_task="embed",
        results=[("embedding", "vector")],
        path="/v1/embeddings",
        fields=lambda texts: {"input": texts, "encoding_format": "base64"},
        of_item=lambda item: (_vector(item["embedding"]),),
    ),
    "token-embed": TableTask(
        model_task="token_embed",
        results=[("embeddings", "vectors")],
        path="/pooling",
        fields=lambda texts: {"input": texts, "task": "token_embed"},
        of_item=lambda item: (np.array(item["data"], np.float32),),
    ),
    "sparse": TableTask(
        model_task="sparse_embed",
        results=[("sparse_embedding", "sparse")],
        of_output=lambda _, output: ((output.indices, output.values),),
        path="/pooling",
        fields=lambda texts: {"input": texts, "task": "sparse_embed"},
        of_item=lambda item: (_scored(item["data"], "value"),),
    ),
    "classify": TableTask(
        model_task="classify",
        results=[("label", "string"), ("score", "number"), ("probabilities", "numbers")],
        of_output=lambda model, output: (model.label(int(np.argmax(output))), output.max(), output),
        path="/classify",
        fields=lambda texts: {"input": texts},
        of_item=lambda item: (item["label"], np.float32(max(item["probs"])), np.array(item["probs"], np.float32)),
    ),
    "score": TableTask(
        model_task="score",
        columns=("query", "document"),
        results=[("score", "number")],
        path="/score",
        fields=lambda queries, documents: {"text_1": queries, "text_2": documents},
        of_item=lambda item: (np.float32(item["score"]),),
        example=("a", "b"),
        sample=[(SAMPLE, SAMPLE[:500])] * 3,
    ),
    "rerank": TableTask(
        model_task="score",
        columns=("query", "documents"),
        results=[("results", "sparse")],
        path="/v1/rerank",
        fields=lambda queries, documents: {"query": queries[0], "documents": documents},
        of_item=lambda ranked: (_scored(ranked, "relevance_score"),),
        is_ranking=True,
        example=("a", ["b"]),
        sample=[(SAMPLE[:20], [SAMPLE])] * 3,
    ),
}
"""The tasks by the names of their commands."""


@frozen(kw_only=True)
class TaskOptions:
    """The task of a run, its columns and its options; options of other tasks have no effect."""

    task: TaskName
    columns: tuple[str, ...]
    dimensions: int | None = None
    dtype: VectorFormat = field(default="float32", validator=in_(get_args(VectorFormat)))
    top_n: int | None = None

    @property
    def record(self) -> TableTask:
        """The record of the task."""
        return TABLE_TASKS[self.task]

    def texts_of(self, rows: Sequence[Values]) -> list[list[str]]:
        """Return the texts of each column of the rows; of a ranking, which is one row, its query and its documents.

        Raises ``InvalidRequestError`` for other values.
        """
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True))
        if self.record.is_ranking:
            ((query, documents),) = rows
            require_request(
                isinstance(documents, list), f"The value of the column {self.columns[1]} is not a list of texts."
            )
            columns = [query], documents
        for name, values in zip(self.columns, columns, strict=True):
            require_request(
                all(isinstance(value, str) for value in values), f"The value of the column {name} is not a text."
            )
        return list(map(list, columns))

    def output_columns(self, dimensions: int) -> list[OutputColumn]:
        """Return the columns of the output after the id, for a model with vectors of that length.

        Raises ``BulkInputError``.
        """
        if not self.record.n_axes:
            return [OutputColumn(*column) for column in self.record.results]
        ((name, kind),) = self.record.results
        length = self.dimensions or dimensions
        if self.dtype != "binary":
            return [OutputColumn(name, kind, length, self.dtype)]
        require(length % 8 == 0, f"--dtype binary requires a multiple of 8 dimensions, not {length}.", BulkInputError)
        return [OutputColumn(name, kind, length // 8, "int8")]

    def written(self, values: Values) -> Values:
        """Return the values of a row as they are written: vectors with the type of ``--dtype``."""
        return (as_dtype(values[0], self.dtype),) if self.record.n_axes else values


async def compute_parts(
    count: int, compute: Callable[[int], Awaitable[WindowResult[RowResult]]]
) -> WindowResult[RowResult]:
    """Return the results of consecutive parts, computed at the same time, as one.

    Raises and is cancelled as ``compute``, which takes the index of a part.
    """
    results = [WindowResult[RowResult]([])] * count

    async def compute_part(index: int) -> None:
        results[index] = await compute(index)

    with unwrap_exception_groups(PoolServeError):
        async with trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(compute_part, index)
    return WindowResult.joined(results)


async def compute_halving(
    rows: Sequence[InputRow],
    compute: Callable[[Sequence[Values]], Awaitable[tuple[list[Values], int]]],
    faults: tuple[type[PoolServeError], ...],
) -> WindowResult[RowResult]:
    """Compute rows; if that fails with one of the ``faults``, both halves, down to the row at fault.

    ``compute`` returns the output's values for rows with these input values, and the number of tokens computed.
    Raises ``UnavailableError``, and the errors of ``compute`` other than ``faults``. Cancellation: as ``compute``.
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


@define(eq=False)
class TableComputer(Computer[InputRow, RowResult]):
    """Computes rows of a table: with a model in this process, or by a server."""

    task: TaskOptions
    text: TextOptions
    columns: Sequence[OutputColumn]
    """The columns of the output for ``RowResult.values``."""

    def parts_of(self, rows: Sequence[InputRow], size: int) -> list[Sequence[InputRow]]:
        """Return rows in parts of at most ``size``; each row of a ranking is a part."""
        step = 1 if self.task.record.is_ranking else size
        return [rows[begin : begin + step] for begin in range(0, len(rows), step)]

    @abstractmethod
    async def identity(self) -> dict[str, str]:
        """Return the properties that decide the numbers, by name; the journal keeps them. Cancellation: at once."""

    def refused(self, row: InputRow) -> RowResult:
        """Return the error of a row."""
        return RowResult(error=row.error)

    def died(self, row: InputRow) -> RowResult:  # noqa: ARG002  (the error is the same for all rows)
        """Return the error of a row that ends engine processes."""
        return RowResult(error="The engine process died while it computed this row.")

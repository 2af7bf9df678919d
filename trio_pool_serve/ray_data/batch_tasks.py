"""Callable classes that add columns to batches, one for each task of the bulk commands.

A row that fails, because it is null, not a string, too long or cannot be computed, has the reason in the column
``error`` and null in the others that are added; the other rows of the batch are computed all the same. ``prefix`` comes
before the names of all columns that are added. Further options are ``EngineOptions``.

The constructors load the model. They raise ``ModelLoadError``, ``InvalidRequestError`` if the model cannot do the task,
and ``ValueError`` or ``TypeError`` for wrong options. A call takes a batch in any of Ray's formats and returns a
``pyarrow.Table`` with its columns and rows, in its order. It raises ``BulkInputError`` for a missing column or one that
is there already, ``EngineDeadError`` if the engine fails, and ``UnavailableError`` if none is ready for two minutes.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from trio_pool_serve.bulk.bulk_options import VectorFormat
from trio_pool_serve.bulk.own_engine import OwnEngine
from trio_pool_serve.ray_data.actor_engine import EngineOptions, WithEngine
from trio_pool_serve.ray_data.batch_tables import as_table, check_columns, result_columns, rows_of, with_results
from trio_pool_serve.runs.run import compute_window
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_rows import OutputColumn, RowResult
from trio_pool_serve.runs.tables.table_windows import cut_windows, window_characters

logger = logging.getLogger(__name__)


class BatchTask(WithEngine):
    """The base of the classes for batches."""

    def __init__(self, model: str, prefix: str, options: EngineOptions, **task: Any) -> None:
        super().__init__(model, options, **task)
        self._columns = result_columns(self._call(_columns_of), prefix)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its results; see the module. Blocks until all rows are computed."""
        table = as_table(batch)
        check_columns(table, self._task.columns, [column.name for column in self._columns])
        results = self._call(partial(_compute, rows=rows_of(table, self._task.columns)))
        return with_results(table, results, self._columns)


async def _columns_of(engine: OwnEngine) -> Sequence[OutputColumn]:
    return engine.columns


async def _compute(engine: OwnEngine, rows: list[InputRow]) -> list[RowResult]:
    cut = cut_windows(rows, characters=window_characters(engine.columns))
    windows = [await compute_window(engine, window.rows, logger.warning) for window in cut]
    return [result for window in windows for result in window.rows]


class Embed(BatchTask):
    """Adds ``embedding``: a list of fixed size, of ``dtype``, float32 by default; with ``binary`` a bit a dimension.

    ``column`` has the texts, ``dimensions`` is the length to which vectors are truncated.
    """

    _computes = "embed"

    def __init__(
        self,
        model: str,
        column: str = "text",
        *,
        dimensions: int | None = None,
        dtype: VectorFormat = "float32",
        prefix: str = "",
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(
            model, prefix, options, task=self._computes, columns=(column,), dimensions=dimensions, dtype=dtype
        )


class TokenEmbed(Embed):
    """Adds ``embeddings``: for each token a list of fixed size, as ``Embed`` has for each text."""

    _computes = "token-embed"


class Sparse(BatchTask):
    """Adds ``sparse_embedding``: a list of ``{index: int32, score: float32}`` with the weights of the vocabulary."""

    def __init__(self, model: str, column: str = "text", *, prefix: str = "", **options: Unpack[EngineOptions]) -> None:
        super().__init__(model, prefix, options, task="sparse", columns=(column,))


class Classify(BatchTask):
    """Adds ``label``, its probability as ``score`` (float32), and the ``probabilities`` of all labels (float32)."""

    def __init__(self, model: str, column: str = "text", *, prefix: str = "", **options: Unpack[EngineOptions]) -> None:
        super().__init__(model, prefix, options, task="classify", columns=(column,))


class Score(BatchTask):
    """Adds ``score`` (float32), of each row's query and document."""

    def __init__(
        self,
        model: str,
        query_column: str = "query",
        document_column: str = "document",
        *,
        prefix: str = "",
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, prefix, options, task="score", columns=(query_column, document_column))


class Rerank(BatchTask):
    """Adds ``results``: the documents of a row, best first, as a list of ``{index: int32, score: float32}``.

    ``documents_column`` has a list of texts in each row; ``top_n`` is the most documents of a result.
    """

    def __init__(
        self,
        model: str,
        query_column: str = "query",
        documents_column: str = "documents",
        *,
        top_n: int | None = None,
        prefix: str = "",
        **options: Unpack[EngineOptions],
    ) -> None:
        if top_n is not None and top_n < 1:
            raise ValueError(f"top_n is {top_n}: it must be at least 1.")
        super().__init__(model, prefix, options, task="rerank", columns=(query_column, documents_column), top_n=top_n)

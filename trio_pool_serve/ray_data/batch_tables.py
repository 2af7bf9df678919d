"""Batches of Ray Data as Arrow tables, and results as columns of them."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from attrs import evolve

from trio_pool_serve.errors import BulkInputError, require
from trio_pool_serve.runs.tables import arrow_rows
from trio_pool_serve.runs.tables.input_rows import InputRow, Selection, listed
from trio_pool_serve.runs.tables.output_rows import BatchBuilder, OutputColumn, RowResult


def as_table(batch: Any) -> pa.Table:
    """Return a batch in any of Ray's formats as the table that Ray itself would make of it; no copy of one in Arrow."""
    if isinstance(batch, pa.Table):
        return batch
    from ray.data.block import BlockAccessor  # imported here: with such batches, ray is installed

    return BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()


def check_columns(table: pa.Table, wanted: Sequence[str], added: Sequence[str]) -> None:
    """Raise ``BulkInputError`` if a wanted column is missing, or one that is to be added is there."""
    for column in wanted:
        require(
            column in table.column_names,
            f"No column {column!r}. The columns are: {listed(table.column_names)}.",
            BulkInputError,
        )
    for column in added:
        require(
            column not in table.column_names,
            f"A column {column!r} exists already. Pass another `prefix` for the new columns.",
            BulkInputError,
        )


def rows_of(table: pa.Table, columns: Sequence[str]) -> list[InputRow]:
    """Return the rows; rows with null, or with a value that cannot be read, have an error."""
    wanted = table.select(list(dict.fromkeys(columns)))
    return list(arrow_rows.rows_of(wanted, 0, Selection("", columns, None, first=0, skip=0)))


def result_columns(columns: Sequence[OutputColumn], prefix: str) -> list[OutputColumn]:
    """Return the columns that are added to a batch: the columns of the results, and ``error``."""
    named = [evolve(column, name=f"{prefix}{column.name}") for column in columns]
    return [*named, OutputColumn(f"{prefix}error", "string")]


def with_results(table: pa.Table, results: Sequence[RowResult], columns: Sequence[OutputColumn]) -> pa.Table:
    """Return the table with ``columns``: in a failed row, only the last one is not null, the error."""
    nulls = (None,) * (len(columns) - 1)
    rows = [(*nulls, result.error) if result.error else (*result.values, None) for result in results]
    added = BatchBuilder(columns).batch(rows)
    for field, array in zip(added.schema, added.columns, strict=True):
        table = table.append_column(field, array)
    return table

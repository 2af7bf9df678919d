"""Rows of Parquet files and of Arrow IPC files and streams."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, BinaryIO

import numpy as np

from trio_pool_serve.errors import BulkInputError, require
from trio_pool_serve.runs.tables import input_rows
from trio_pool_serve.runs.tables.input_rows import (
    DEFAULT_ID,
    InputRow,
    RowId,
    RowsOfFile,
    Selection,
    id_of,
    index_of,
)
from trio_pool_serve.runs.tables.table_formats import import_extra

READING = "Reading Parquet and Arrow files"

PAGE_READ_BYTES = 2**20
"""Column chunks are read in pieces of this size, not as a whole: a row group may be the whole file."""

BLOCK_ROWS = 1024
BLOCK_BYTES = 8 * 2**20
"""The most that is decoded, or in memory as Python objects, at a time, except for a single row."""

FILE_MAGIC = b"ARROW1"
OLD_FEATHER_MAGIC = b"FEA1"


def arrow_rows(
    file: BinaryIO, selection: Selection, batches: Callable[[BinaryIO, Selection], Iterator[tuple[int, Any]]]
) -> RowsOfFile:
    """Read a file, whose ``batches`` come with their numbers of rows, None in place of a skipped one.

    Raises ``BulkInputError`` if a column is missing.
    """
    pyarrow = import_extra("pyarrow", READING)
    n_rows = 0
    try:
        for n, batch in batches(file, selection):
            if batch is not None:
                yield from rows_of(batch, n_rows, selection)
            n_rows += n
    except (pyarrow.ArrowException, OSError) as error:  # OSError: for damaged pages, too
        reason = (str(error).splitlines() or [repr(error)])[0]
        damage = "" if isinstance(error, OSError) else " is truncated or damaged"
        raise BulkInputError(f"{selection.name}{damage}: {reason}") from error
    return n_rows


def parquet_batches(file: BinaryIO, selection: Selection) -> Iterator[tuple[int, Any]]:
    """Yield the batches of a Parquet file; for a row group that is skipped, None."""
    parquet = import_extra("pyarrow.parquet", READING).ParquetFile(
        file, pre_buffer=False, buffer_size=PAGE_READ_BYTES, page_checksum_verification=True
    )
    columns = _columns_to_read(parquet.schema_arrow, selection)
    n_rows = 0
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        n_rows += metadata.num_rows
        if n_rows <= selection.skip:
            yield metadata.num_rows, None
            continue
        size = _rows_per_block(metadata.total_byte_size, metadata.num_rows)
        for batch in parquet.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
            yield batch.num_rows, batch


def ipc_batches(file: BinaryIO, selection: Selection) -> Iterator[tuple[int, Any]]:
    """Yield the batches of an Arrow file or stream."""
    schema = _ipc_reader(file, selection.name, None).schema
    included = sorted(schema.get_field_index(column) for column in _columns_to_read(schema, selection))
    file.seek(0)
    reader = _ipc_reader(file, selection.name, included or [0])  # to count rows, any column; without one, all are read
    if hasattr(reader, "num_record_batches"):
        reader = map(reader.get_batch, range(reader.num_record_batches))
    for batch in reader:
        yield batch.num_rows, batch


def _ipc_reader(file: BinaryIO, name: str, included: list[int] | None) -> Any:
    ipc = import_extra("pyarrow.ipc", READING)
    start = file.read(len(FILE_MAGIC))
    file.seek(0)
    require(bool(start), f"{name} is empty.", BulkInputError)
    require(
        not start.startswith(OLD_FEATHER_MAGIC),
        f"{name} is a Feather file of version 1, which is not supported. Write it as version 2.",
        BulkInputError,
    )
    opened = ipc.open_file if start == FILE_MAGIC else ipc.open_stream
    return opened(file, options=ipc.IpcReadOptions(included_fields=included))


def _columns_to_read(schema: Any, selection: Selection) -> list[str]:
    """Return the names of the columns, each once, ``DEFAULT_ID`` among them if it is used."""
    row_id = _id_column(schema, selection)
    wanted = dict.fromkeys([*selection.columns, *([] if row_id is None else [row_id])])
    for column in wanted:
        index_of(column, schema.names, selection.name)
    return list(wanted)


def _id_column(schema: Any, selection: Selection) -> str | None:
    default = DEFAULT_ID if schema.names.count(DEFAULT_ID) == 1 else None
    return default if selection.id_column is None else selection.id_column


def _rows_per_block(n_bytes: int, n_rows: int) -> int:
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES * n_rows // max(1, n_bytes)))


def rows_of(batch: Any, before: int, selection: Selection) -> Iterator[InputRow]:
    """Yield the rows of a record batch or table, which follows ``before`` rows of its file.

    One block at a time is converted to Python objects.
    """
    columns, id_column, first = selection.columns, selection.id_column, selection.first
    id_read = _id_column(batch.schema, selection)
    step = _rows_per_block(batch.nbytes, batch.num_rows)
    for start in range(max(0, selection.skip - before), batch.num_rows, step):
        part = batch.slice(start, step)
        ids = [None] * part.num_rows if id_read is None else objects_of(part.column(id_read))
        rows = zip(*[objects_of(part.column(column)) for column in columns], strict=True)
        for at, found, values in zip(count(before + start), ids, rows, strict=False):
            row_id: RowId = first + at
            error = ""
            try:
                if isinstance(found, Exception):
                    check_value(found, id_read or "")
                row_id = id_of(found, id_column, first + at)
                for column, value in zip(columns, values, strict=True):
                    check_value(value, column)
            except ValueError as problem:
                values, error = (), str(problem)
            yield InputRow(first + at, selection.name, row_id, values, error, at + 1)


def check_value(value: Any, column: str) -> None:
    """Raise ``ValueError`` if a value of a column is null, too long, or the error of one that cannot be read."""
    if value is None:
        raise ValueError(f"The column {column!r} is null.")
    if isinstance(value, (str, bytes)) and len(value) > input_rows.MAX_ROW_BYTES:
        raise ValueError(f"The value of the column {column!r} exceeds {input_rows.MAX_ROW_BYTES} bytes.")
    if isinstance(value, UnicodeDecodeError):  # Arrow does not check what it reads
        raise ValueError(f"The value of the column {column!r} is not UTF-8.")  # noqa: TRY004
    if isinstance(value, Exception):
        reason = (str(value) or repr(value)).encode(errors="replace").decode()  # Arrow takes no other strings
        raise ValueError(f"The value of the column {column!r} cannot be read: {reason}")  # noqa: TRY004


def objects_of(column: Any) -> list[Any]:
    """Return the values of an Arrow array as Python objects, or the error of one that cannot be read.

    Arrow has values that Python has not: strings that are not UTF-8, times before the year 1 or after 9999, indices
    that are not in their dictionary, and pickled objects whose class is missing or raises.
    """
    try:
        values = column.to_pylist()
    except Exception:  # any, as unpickling may raise
        values = [_object(value) for value in column]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]  # Ray's tensors are arrays


def _object(value: Any) -> Any:
    try:
        return value.as_py()
    except Exception as error:
        return error

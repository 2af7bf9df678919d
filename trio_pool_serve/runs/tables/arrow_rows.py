"""Rows of Parquet files and of Arrow IPC files and streams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from attrs import frozen

from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.tables import input_row
from trio_pool_serve.runs.tables.input_row import DEFAULT_ID, Cursor, InputRow, id_of, index_of
from trio_pool_serve.runs.tables.table_formats import Kind, import_extra

PURPOSE = "Reading Parquet and Arrow files"

PAGE_READ_BYTES = 2**20
"""Column chunks are read in pieces of this size, not as a whole: a row group may be the whole file."""

BLOCK_ROWS = 1024
BLOCK_BYTES = 8 * 2**20
"""At most so much is decoded, or as Python objects in memory, at a time, but for one row."""

FILE_MAGIC = b"ARROW1"
OLD_FEATHER_MAGIC = b"FEA1"


@frozen
class _Columns:
    """Which columns are wanted of a file, and which are read for that."""

    values: tuple[str, ...]
    id: str | None
    id_needed: bool

    @property
    def read(self) -> list[str]:
        """The names of the columns to read, each once."""
        return list(dict.fromkeys([*self.values, *([self.id] if self.id is not None else [])]))


def arrow_rows(
    file: BinaryIO, name: str, kind: Kind, columns: Sequence[str], id_column: str | None, cursor: Cursor
) -> Iterator[InputRow]:
    """Yield the rows of a file, from the cursor on. Raises ``BulkInputError`` if a column is missing."""
    batches = _parquet_batches if kind == "parquet" else _ipc_batches
    with _arrow_errors(name):
        begin = cursor.number
        for batch, wanted in batches(file, name, columns, id_column, cursor):
            yield from _rows(batch, begin, name, wanted, cursor)


def count_arrow_rows(file: BinaryIO, name: str, kind: Kind) -> int:
    """Return the number of rows, for which only metadata are decoded, and the first column of Arrow's batches."""
    pyarrow = import_extra("pyarrow", PURPOSE)
    with _arrow_errors(name):
        if kind == "parquet":
            return int(import_extra("pyarrow.parquet", PURPOSE).read_metadata(file).num_rows)
        options = pyarrow.ipc.IpcReadOptions(included_fields=[0])
        return sum(batch.num_rows for batch in _all_batches(file, name, options))


@contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    pyarrow = import_extra("pyarrow", PURPOSE)
    try:
        yield
    except pyarrow.ArrowException as error:
        raise BulkInputError(f"{name} is truncated or damaged: {_first_line(error)}") from error
    except OSError as error:  # what Arrow raises for damaged pages, too
        raise BulkInputError(f"{name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _parquet_batches(
    file: BinaryIO, name: str, columns: Sequence[str], id_column: str | None, cursor: Cursor
) -> Iterator[tuple[Any, _Columns]]:
    """Yield batches. Row groups before the cursor are not read."""
    parquet = import_extra("pyarrow.parquet", PURPOSE).ParquetFile(
        file, pre_buffer=False, buffer_size=PAGE_READ_BYTES, page_checksum_verification=True
    )
    wanted = _wanted(parquet.schema_arrow, name, columns, id_column)
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        if metadata.num_rows <= cursor.skipping:
            cursor.number += metadata.num_rows
            continue
        size = _rows_per_block(metadata.total_byte_size, metadata.num_rows)
        for batch in parquet.iter_batches(size, row_groups=[group], columns=wanted.read, use_threads=False):
            yield batch, wanted


def _ipc_batches(
    file: BinaryIO, name: str, columns: Sequence[str], id_column: str | None, _cursor: Cursor
) -> Iterator[tuple[Any, _Columns]]:
    pyarrow = import_extra("pyarrow", PURPOSE)
    reader = _ipc_reader(file, name, None)
    wanted = _wanted(reader.schema, name, columns, id_column)
    included = sorted(reader.schema.get_field_index(column) for column in wanted.read)
    file.seek(0)
    for batch in _all_batches(file, name, pyarrow.ipc.IpcReadOptions(included_fields=included)):
        yield batch, wanted


def _all_batches(file: BinaryIO, name: str, options: Any) -> Iterator[Any]:
    reader = _ipc_reader(file, name, options)
    if hasattr(reader, "num_record_batches"):
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _ipc_reader(file: BinaryIO, name: str, options: Any) -> Any:
    pyarrow = import_extra("pyarrow", PURPOSE)
    start = file.read(len(FILE_MAGIC))
    file.seek(0)
    if not start:
        raise BulkInputError(f"{name} is empty.")
    if start.startswith(OLD_FEATHER_MAGIC):
        raise BulkInputError(f"{name} is a Feather file of version 1, which is not read. Write it as version 2.")
    if start == FILE_MAGIC:
        return pyarrow.ipc.open_file(file, options=options)
    return pyarrow.ipc.open_stream(file, options=options)


def _wanted(schema: Any, name: str, columns: Sequence[str], id_column: str | None) -> _Columns:
    names = schema.names
    for column in [*columns, *([id_column] if id_column is not None else [])]:
        index_of(column, names, name)
    default_id = DEFAULT_ID if names.count(DEFAULT_ID) == 1 else None
    return _Columns(tuple(columns), default_id if id_column is None else id_column, id_column is not None)


def _rows_per_block(n_bytes: int, n_rows: int) -> int:
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES * n_rows // max(1, n_bytes)))


def _rows(batch: Any, begin: int, name: str, wanted: _Columns, cursor: Cursor) -> Iterator[InputRow]:
    """Yield the rows of a batch, of which some are Python objects at a time; ``begin`` is the file's first row."""
    skipped = min(cursor.skipping, batch.num_rows)
    cursor.number += skipped
    step = _rows_per_block(batch.nbytes, batch.num_rows)
    for start in range(skipped, batch.num_rows, step):
        part = batch.slice(start, step)
        values = [objects_of(part.column(column)) for column in wanted.values]
        ids = objects_of(part.column(wanted.id)) if wanted.id is not None else [None] * part.num_rows
        for index in range(part.num_rows):
            row = tuple([column[index] for column in values])
            yield _row(row, ids[index], f"{name}:{cursor.number - begin + 1}", wanted, cursor.number)
            cursor.number += 1


def _row(values: tuple[Any, ...], found: Any, place: str, wanted: _Columns, number: int) -> InputRow:
    row_id: str | int | float | bool = number
    try:
        given = id_of(found, wanted.id if wanted.id_needed else None, number)
        if given is None:
            check_value(None, wanted.id or "")
        else:
            row_id = given
        for column, value in zip(wanted.values, values, strict=True):
            check_value(value, column)
    except ValueError as error:
        return InputRow(number, place, row_id, error=str(error))
    return InputRow(number, place, row_id, values)


def check_value(value: Any, column: str) -> None:
    """Raise ``ValueError`` if a value of a column is null, not UTF-8, or too long."""
    if value is None:
        raise ValueError(f"The column {column!r} has null.")
    if isinstance(value, _Unreadable):
        raise ValueError(value.says_why(column))  # noqa: TRY004
    if isinstance(value, str | bytes) and len(value) > input_row.MAX_ROW_BYTES:
        raise ValueError(f"The value of the column {column!r} is too long.")


@frozen
class _Unreadable:
    """Stands for a value that cannot be made a Python object."""

    error: Exception

    def says_why(self, column: str) -> str:
        """Return a message for the user."""
        if isinstance(self.error, UnicodeDecodeError):  # Arrow does not check what it reads
            return f"The column {column!r} is not UTF-8."
        reason = (str(self.error) or repr(self.error)).encode(errors="replace").decode()  # Arrow takes no other strings
        return f"The value of the column {column!r} cannot be read: {reason}"


def objects_of(column: Any) -> list[Any]:
    """Return the values of an Arrow array as Python objects; those that cannot be read are refused by ``check_value``.

    Arrow has values that Python has not: strings that are not UTF-8, times before the year 1 or after 9999, indices
    that are not in their dictionary, and in columns of pickled objects those whose class is missing or raises.
    """
    try:
        return list(column.to_pylist())
    except Exception:  # any, as unpickling may raise
        return [_object(column, index) for index in range(len(column))]


def _object(column: Any, index: int) -> Any:
    try:
        return column[index].as_py()
    except Exception as error:
        return _Unreadable(error)

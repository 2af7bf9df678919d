"""A table that is written up to positions. Everything here blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from trio_pool_serve.errors import BulkInputError, StorageError, StorageLostError
from trio_pool_serve.runs.tables.column_types import OutputColumn
from trio_pool_serve.runs.tables.line_output import LineOutput
from trio_pool_serve.runs.tables.part_folder import PartFolder, check_parts, parts_behind
from trio_pool_serve.runs.tables.position import Position
from trio_pool_serve.runs.tables.table_formats import Format
from trio_pool_serve.storage.durable_files import storage_errors

OutputTable: TypeAlias = LineOutput | PartFolder
"""Rows in a file or in a folder of parts; the same rows and commits give the same bytes.

Their methods raise ``StorageError`` if the disk is full, for example. What was committed is still there then, and the
output can be opened again at its position.
"""


def open_output(
    path: Path | None,
    format: Format,  # noqa: A002
    columns: Sequence[OutputColumn],
    position: bytes | None,
) -> OutputTable:
    """Open an output behind ``position``, or a new one without; then what an earlier run wrote to it is removed.

    ``path`` is a file for JSONL and CSV, None for standard output, and a folder for Parquet and Arrow, whose files have
    the rows of one commit each. Raises ``BulkInputError`` for a folder with other files
    in it, and ``StorageError`` if what had been committed is no longer there.
    """
    if format.in_lines:
        return LineOutput(path, format, columns, position)
    if path is None:
        raise BulkInputError(f"{format} cannot be written to standard output. Use jsonl or csv, or a folder.")
    return PartFolder(path, format, columns, position)


def check_finished(path: Path, table_format: Format, position: bytes | None) -> None:
    """Raise ``StorageError`` if the output of a complete run is no longer what it has left. Nothing is opened."""
    found = Position.decoded(position)
    try:
        with storage_errors(path):
            if not path.exists():
                raise StorageLostError(f"{path} has been deleted.")
            if table_format.in_lines:
                _check_file(path, found)
            else:
                _check_folder(path, table_format, found)
    except StorageError as error:
        raise StorageLostError(
            f"The run is complete, but its output was changed. {error} --overwrite begins again."
        ) from error


def _check_file(path: Path, position: Position) -> None:
    size = path.stat().st_size
    if size != position.n_bytes:
        raise StorageLostError(f"{path} has {size} bytes, where {position.n_bytes} had been written.")


def _check_folder(folder: Path, table_format: Format, position: Position) -> None:
    check_parts(folder, table_format, position)
    behind = parts_behind(folder, table_format, position)
    if behind:
        raise StorageLostError(f"{behind[0]} is new: {position.parts} parts had been written.")

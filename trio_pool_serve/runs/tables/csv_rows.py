"""Rows of CSV and TSV files with a header."""

import csv
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from attrs import frozen

from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.requests.batch_line import read_lines
from trio_pool_serve.runs.tables import input_row
from trio_pool_serve.runs.tables.input_row import DEFAULT_ID, Cursor, InputRow, index_of


@frozen
class _Header:
    """How many cells rows have, and which ones are wanted."""

    n_cells: int
    columns: tuple[int, ...]
    id: int | None


class _RowTooLongError(Exception):
    """A line, or a quoted cell over many lines, is longer than a row may be."""


class _TextLines(Iterator[str]):
    """Lines as text for the parser. Bytes that are not UTF-8 become surrogates, which ``_is_text`` finds.

    Raising ends the row that the parser is in; the next line begins another one.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._lines = read_lines(file, input_row.MAX_ROW_BYTES)
        self.number = 0
        """Of the line that was read last, from 1."""
        self.row_bytes = 0

    def __next__(self) -> str:
        line, _ = next(self._lines)
        self.number += 1
        if line is None or self.row_bytes + len(line) > input_row.MAX_ROW_BYTES:
            raise _RowTooLongError
        self.row_bytes += len(line)
        return line.decode("utf-8", "surrogateescape")


def csv_rows(
    file: BinaryIO, name: str, delimiter: str, columns: Sequence[str], id_column: str | None, cursor: Cursor
) -> Iterator[InputRow]:
    """Yield the rows of a file, from the cursor on. Blank lines are not rows.

    Raises ``BulkInputError`` if a column is missing.
    """
    csv.field_size_limit(max(csv.field_size_limit(), input_row.MAX_ROW_BYTES))  # a setting of the process: 128 KiB
    text = _TextLines(file)
    parser = csv.reader(text, delimiter=delimiter, strict=True)
    header: _Header | None = None
    while True:
        place = f"{name}:{text.number + 1}"
        text.row_bytes = 0
        cells, error = _next_cells(parser)
        if cells is None:
            break
        if not cells and not error:
            continue  # a blank line
        if header is None:
            header = _header(cells, error, name, columns, id_column)
            continue
        number = cursor.number
        cursor.number += 1
        if number >= cursor.start:
            yield _row(cells, error, number, place, header)
    if header is None and columns:
        raise BulkInputError(f"{name} is empty: its first line should be a header with the names of columns.")


def _next_cells(parser: Iterator[list[str]]) -> tuple[list[str] | None, str]:
    """Return the cells of the next row, None at the end, and what is wrong with the row."""
    try:
        return next(parser), ""
    except StopIteration:
        return None, ""
    except csv.Error as error:
        return [], f"The row is not valid CSV: {error}."
    except _RowTooLongError:
        return [], "The row is too long."


def _header(cells: list[str], error: str, name: str, columns: Sequence[str], id_column: str | None) -> _Header:
    if error or not all(map(_is_text, cells)):
        raise BulkInputError(f"{name}: the header cannot be read. {error or 'It is not UTF-8.'}")
    default_id = cells.index(DEFAULT_ID) if DEFAULT_ID in cells else None
    row_id = default_id if id_column is None else index_of(id_column, cells, name)
    return _Header(len(cells), tuple([index_of(column, cells, name) for column in columns]), row_id)


def _row(cells: list[str], error: str, number: int, place: str, header: _Header) -> InputRow:
    if not error and len(cells) != header.n_cells:
        error = f"The row has {len(cells)} cells, the header {header.n_cells}."
    if error:
        return InputRow(number, place, number, error=error)
    row_id = number if header.id is None else cells[header.id]
    values = tuple([cells[column] for column in header.columns])
    if not all(map(_is_text, values)) or not _is_text(str(row_id)):
        return InputRow(number, place, number, error="The row is not UTF-8.")
    return InputRow(number, place, row_id, values)


def _is_text(cell: str) -> bool:
    try:
        return cell.isascii() or bool(cell.encode())
    except UnicodeEncodeError:
        return False

"""Rows of an input, and how they are read from JSON lines, CSV and TSV.

CSV is read by the standard library. Arrow's reader would need the extra [bulk], has no line numbers, ends the file at a
row that is longer than its block, and accepts errors: text after a closing quote, and a quote that is never closed,
after which all lines are one value. It is no faster if the values become Python objects: on one core it
reads 1.3 million rows/s of two columns, where ``csv.reader`` reads 1.7 million.
"""

import csv
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec
from attrs import define, frozen

from trio_pool_serve.errors import BulkInputError, require
from trio_pool_serve.runs.requests.request_lines import read_lines

DEFAULT_ID = "id"
"""The id column if none is named and there is one."""

MAX_ROW_BYTES = 64 * 2**20
"""The limit of a line or value. A longer one is an error of its row: a missing quote must not fill the memory."""

DECODER = msgspec.json.Decoder()

RowId: TypeAlias = str | int | float | bool


class InputRow(msgspec.Struct, frozen=True, gc=False):
    """A row that was read.

    ``number`` counts over all files, from 0. ``at`` counts in ``file`` from 1: lines of a text file, rows of others.
    ``id`` is the value of the id column, or the number. ``values`` has one for each column that was asked for; it is
    empty if ``error`` says why the row cannot be used.
    """

    number: int
    file: str
    id: RowId
    values: tuple[Any, ...] = ()
    error: str = ""
    at: int = 0

    @property
    def place(self) -> str:
        """Where the row is, for people: ``texts.jsonl:17``."""
        return f"{self.file}:{self.at}"


@frozen
class Selection:
    """The rows and columns to read of a file.

    ``name`` is the file's, for messages. Without an ``id_column``, ``DEFAULT_ID`` is used if there is one. ``first`` is
    the number of the file's first row in the table, and ``skip`` how many of its rows are left out.
    """

    name: str
    columns: Sequence[str]
    id_column: str | None
    first: int
    skip: int


RowsOfFile: TypeAlias = Generator[InputRow, None, int]
"""Yields the selected rows of a file, and returns how many rows it has. Blank lines are not rows."""


def id_of(found: Any, id_column: str | None, number: int) -> RowId:
    """Return an id that every output can write; a row without one gets its number, unless a column is named.

    Integers of more than 64 bits become strings: JSON encoders and Arrow reject them. Raises ``ValueError`` if a column
    is named and ``found`` is no id.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, int):
        return found if -(2**63) <= found < 2**63 else str(found)
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    is_nested = isinstance(found, list | dict)
    if found is not None and not is_nested and not (isinstance(found, float) and not math.isfinite(found)):
        return found if isinstance(found, float) else str(found)
    if id_column is None:
        return number
    raise ValueError(f"The column {id_column!r} is {'a list or an object, not an id' if is_nested else 'null'}.")


def index_of(column: str, names: Sequence[str], file: str) -> int:
    """Return the index of a column in a header or schema. Raises ``BulkInputError`` unless it is there once."""
    if names.count(column) != 1:
        many = "several columns named" if column in names else "no column"
        raise BulkInputError(f"{file} contains {many} {column!r}. Its columns are: {listed(names)}.")
    return names.index(column)


def listed(names: Iterable[str]) -> str:
    """Return names for an error message, at most twenty of them."""
    found = [repr(name if len(name) <= 100 else f"{name[:100]}…") for name in names]
    return ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")


def jsonl_rows(file: BinaryIO, selection: Selection) -> RowsOfFile:
    """Read JSON lines: objects, or strings if one column is asked for."""
    n_rows = 0
    for at, (line, _) in enumerate(read_lines(file, MAX_ROW_BYTES), 1):
        if line is None or (line and not line.isspace()):
            if n_rows >= selection.skip:
                yield _of_line(line, selection.first + n_rows, at, selection)
            n_rows += 1
    return n_rows


def _of_line(line: bytes | None, number: int, at: int, selection: Selection) -> InputRow:
    columns, id_column = selection.columns, selection.id_column
    row_id: RowId = number
    if line is None:
        return InputRow(number, selection.name, number, (), f"The line exceeds {MAX_ROW_BYTES} bytes.", at)
    try:
        decoded = DECODER.decode(line)
        if isinstance(decoded, dict):
            found = decoded.get(DEFAULT_ID) if id_column is None else _present(decoded, id_column)
            row_id = id_of(found, id_column, number)
            values = tuple(map(decoded.get, columns))
            if None in values:
                _present(decoded, columns[values.index(None)])
        elif not isinstance(decoded, str):
            raise ValueError("The line is neither a JSON object nor a JSON string.")  # noqa: TRY004, TRY301
        elif len(columns) != 1 or id_column is not None:
            wanted = listed([*columns, *([id_column] if id_column is not None else [])])
            raise ValueError(f"The line is a JSON string; it must be an object with {wanted}.")  # noqa: TRY301
        else:
            values = (decoded,)
        return InputRow(number, selection.name, row_id, values, "", at)
    except UnicodeDecodeError:
        error = "The line is not UTF-8."
    except (msgspec.DecodeError, RecursionError) as found:
        error = f"The line is not valid JSON: {found}."
    except ValueError as found:
        error = str(found)
    return InputRow(number, selection.name, row_id, (), error, at)


def _present(row: dict[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None:
        if column in row:
            raise ValueError(f"The column {column!r} is null.")
        raise ValueError(f"The column {column!r} is missing. The columns are: {listed(row) or 'none'}.")
    return value


@define(eq=False)
class _TextLines(Iterator[str]):
    """Lines as text for the parser. Bytes that are not UTF-8 become surrogates, which ``_is_text`` finds.

    Raises ``ValueError`` for a row that is too long: that ends it for the parser, and the next line begins another one.
    """

    lines: Iterator[tuple[bytes | None, int]]
    number: int = 0
    """The line read last, from 1."""
    row_bytes: int = 0

    def __next__(self) -> str:
        line, _ = next(self.lines)
        self.number += 1
        if line is None or self.row_bytes + len(line) > MAX_ROW_BYTES:
            raise ValueError(f"The row exceeds {MAX_ROW_BYTES} bytes.")
        self.row_bytes += len(line)
        return line.decode("utf-8", "surrogateescape")


@frozen
class _Header:
    """How many cells rows have, and which ones are wanted."""

    n_cells: int
    columns: tuple[int, ...]
    id: int | None


def csv_rows(file: BinaryIO, selection: Selection, delimiter: str) -> RowsOfFile:
    """Read CSV or TSV with a header. Raises ``BulkInputError`` if that has no such column."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))  # a setting of the process: 128 KiB
    text = _TextLines(read_lines(file, MAX_ROW_BYTES))
    parser = csv.reader(text, delimiter=delimiter, strict=True)
    header: _Header | None = None
    n_rows = 0
    while True:
        at, text.row_bytes, error = text.number + 1, 0, ""
        try:
            cells = next(parser)
        except StopIteration:
            break
        except csv.Error as found:
            cells, error = [], f"The row is not valid CSV: {found}."
        except ValueError as found:
            cells, error = [], str(found)
        if not cells and not error:
            continue  # a blank line
        if header is None:
            header = _header(cells, error, selection)
            continue
        if n_rows >= selection.skip:
            number = selection.first + n_rows
            row_id, values, error = (number, (), error) if error else _picked(cells, header, number)
            yield InputRow(number, selection.name, row_id, values, error, at)
        n_rows += 1
    if header is None and selection.columns:
        raise BulkInputError(f"{selection.name} is empty. Its first line must be a header with the names of columns.")
    return n_rows


def _header(cells: list[str], error: str, selection: Selection) -> _Header:
    name, id_column = selection.name, selection.id_column
    require(
        not error and _is_text("".join(cells)),
        f"{name}: the header cannot be read. {error or 'It is not UTF-8.'}",
        BulkInputError,
    )
    default_id = cells.index(DEFAULT_ID) if DEFAULT_ID in cells else None
    row_id = default_id if id_column is None else index_of(id_column, cells, name)
    return _Header(len(cells), tuple([index_of(column, cells, name) for column in selection.columns]), row_id)


def _picked(cells: list[str], header: _Header, number: int) -> tuple[RowId, tuple[str, ...], str]:
    """Return the id and the values of a row, and why it cannot be used."""
    if len(cells) != header.n_cells:
        return number, (), f"The row has {len(cells)} cells, but the header has {header.n_cells}."
    row_id = number if header.id is None else cells[header.id]
    values = tuple(map(cells.__getitem__, header.columns))
    if not _is_text(f"{row_id}{''.join(values)}"):
        return number, (), "The row is not UTF-8."
    return row_id, values, ""


def _is_text(cells: str) -> bool:
    try:
        return cells.isascii() or bool(cells.encode())
    except UnicodeEncodeError:
        return False

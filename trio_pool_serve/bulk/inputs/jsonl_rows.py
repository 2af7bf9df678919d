"""Rows of JSON lines."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from trio_pool_serve.bulk.inputs.input_row import DEFAULT_ID, Cursor, InputRow, json_id, listed
from trio_pool_serve.bulk.inputs.line_reader import LineReader

DECODER = msgspec.json.Decoder()


class UnusableRowError(ValueError):
    """A row cannot be used; the message is what its ``error`` becomes. It never leaves the reader."""


def jsonl_rows(
    file: BinaryIO, name: str, columns: Sequence[str], id_column: str | None, cursor: Cursor
) -> Iterator[tuple[InputRow, int]]:
    """Yield the rows of a file, from the cursor on, each with the size of its line. Blank lines are not rows."""
    lines = LineReader(file)
    for line in lines:
        if line is not None and line.isspace():
            continue
        number = cursor.number
        cursor.number += 1
        if number >= cursor.start:
            yield _row(line, number, f"{name}:{lines.number}", columns, id_column), len(line or b"")


def _row(line: bytes | None, number: int, place: str, columns: Sequence[str], id_column: str | None) -> InputRow:
    row_id: str | int | float | bool = number
    try:
        decoded = _decoded(line)
        if isinstance(decoded, str):
            return InputRow(number, place, number, _single(decoded, columns, id_column))
        row_id = _id(decoded, id_column, number)
        return InputRow(number, place, row_id, tuple([_value(decoded, column) for column in columns]))
    except UnusableRowError as error:
        return InputRow(number, place, row_id, error=str(error))


def _decoded(line: bytes | None) -> dict[str, Any] | str:
    if line is None:
        raise UnusableRowError("The line is too long.")
    try:
        decoded = DECODER.decode(line)
    except UnicodeDecodeError as error:
        raise UnusableRowError("The line is not UTF-8.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnusableRowError(f"The line is not valid JSON: {error}.") from error
    if not isinstance(decoded, dict | str):
        raise UnusableRowError("The line is neither a JSON object nor a JSON string.")
    return decoded


def _single(text: str, columns: Sequence[str], id_column: str | None) -> tuple[str]:
    if len(columns) != 1 or id_column is not None:
        wanted = listed([*columns, *([id_column] if id_column is not None else [])])
        raise UnusableRowError(f"The line is a JSON string, where an object with {wanted} is needed.")
    return (text,)


def _id(row: dict[str, Any], id_column: str | None, number: int) -> str | int | float | bool:
    try:
        found = json_id(row.get(DEFAULT_ID if id_column is None else id_column))
    except TypeError as error:
        if id_column is None:
            return number
        raise UnusableRowError(f"The column {id_column!r} has a list or an object, which is no id.") from error
    if found is not None:
        return found
    if id_column is not None:
        _value(row, id_column)
    return number


def _value(row: dict[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None:
        if column in row:
            raise UnusableRowError(f"The column {column!r} has null.")
        raise UnusableRowError(f"There is no column {column!r}; there are: {listed(row) or 'none'}.")
    return value

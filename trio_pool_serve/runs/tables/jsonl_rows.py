"""Rows of JSON lines."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from trio_pool_serve.runs.requests.batch_line import read_lines
from trio_pool_serve.runs.tables import input_row
from trio_pool_serve.runs.tables.input_row import DEFAULT_ID, Cursor, InputRow, id_of, listed

DECODER = msgspec.json.Decoder()


def jsonl_rows(
    file: BinaryIO, name: str, columns: Sequence[str], id_column: str | None, cursor: Cursor
) -> Iterator[InputRow]:
    """Yield the rows of a file, from the cursor on. Blank lines are not rows."""
    for at, (line, _) in enumerate(read_lines(file, input_row.MAX_ROW_BYTES), 1):
        if line is not None and line.isspace():
            continue
        number = cursor.number
        cursor.number += 1
        if number >= cursor.start:
            yield _row(line, number, f"{name}:{at}", columns, id_column)


def _row(line: bytes | None, number: int, place: str, columns: Sequence[str], id_column: str | None) -> InputRow:
    row_id: str | int | float | bool = number
    try:
        decoded = _decoded(line)
        if isinstance(decoded, str):
            return InputRow(number, place, number, _single(decoded, columns, id_column))
        found = id_of(decoded.get(DEFAULT_ID if id_column is None else id_column), id_column, number)
        if found is not None:
            row_id = found
        else:
            _value(decoded, id_column or DEFAULT_ID)  # raises, but for a number that is not finite
        return InputRow(number, place, row_id, tuple([_value(decoded, column) for column in columns]))
    except ValueError as error:
        return InputRow(number, place, row_id, error=str(error))


def _decoded(line: bytes | None) -> dict[str, Any] | str:
    if line is None:
        raise ValueError("The line is too long.")
    try:
        decoded = DECODER.decode(line)
    except UnicodeDecodeError as error:
        raise ValueError("The line is not UTF-8.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"The line is not valid JSON: {error}.") from error
    if not isinstance(decoded, dict | str):
        raise ValueError("The line is neither a JSON object nor a JSON string.")  # noqa: TRY004
    return decoded


def _single(text: str, columns: Sequence[str], id_column: str | None) -> tuple[str]:
    if len(columns) != 1 or id_column is not None:
        wanted = listed([*columns, *([id_column] if id_column is not None else [])])
        raise ValueError(f"The line is a JSON string, where an object with {wanted} is needed.")
    return (text,)


def _value(row: dict[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None:
        if column in row:
            raise ValueError(f"The column {column!r} has null.")
        raise ValueError(f"There is no column {column!r}; there are: {listed(row) or 'none'}.")
    return value

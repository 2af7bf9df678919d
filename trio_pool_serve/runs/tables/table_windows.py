"""The windows of a table's rows, which a run reads one after the other."""

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence

from trio_pool_serve.runs.run import Position, Window
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import InputTable
from trio_pool_serve.runs.tables.output_rows import OutputColumn

WINDOW_ROWS = 2048

WINDOW_CHARACTERS = 4 * 2**20
"""A window ends with the row with which it reaches this number: the more rows, the less the rows of a batch differ in
length."""

TOKEN_WINDOW_CHARACTERS = 32 * 2**10
"""The same limit if each token has a vector: about 8192 vectors of English text, 32 MiB with 1024 numbers each."""


def window_characters(columns: Sequence[OutputColumn]) -> int:
    """Return the characters with which a window ends, if its results have these columns."""
    return TOKEN_WINDOW_CHARACTERS if any(column.type == "vectors" for column in columns) else WINDOW_CHARACTERS


def table_windows(
    position: Position,
    *,
    table: InputTable,
    columns: Sequence[str],
    id_column: str | None,
    numbers: range,
    rows_per_part: int | None,
    characters: int,
) -> Generator[Window[InputRow], None, None]:
    """Yield the windows of a table from a position on, with the rows that have these ``numbers``. Blocks.

    The numbers end at a limit, or are each n-th for one of n shards. The output is committed after each window, or
    after ``rows_per_part`` rows of the table for each shard. Raises ``InputChangedError`` if a file was changed since
    its scan.
    """

    def rows_before_limit() -> Iterator[InputRow]:
        for row in table.rows(columns, id_column, position.line):
            if row.number >= numbers.stop:
                return
            yield row
        table.check_unchanged()  # all files have been read

    for window in cut_windows(rows_before_limit(), numbers, rows_per_part, characters=characters):
        table.check_read()
        yield window


def cut_windows(
    rows: Iterable[InputRow],
    numbers: range = range(sys.maxsize),
    rows_per_part: int | None = None,
    *,
    characters: int = WINDOW_CHARACTERS,
) -> Iterator[Window[InputRow]]:
    """Yield the windows of consecutive rows, of which only ``numbers`` are computed; see ``table_windows``."""
    window: list[InputRow] = []
    length, number = 0, -1
    for row in rows:
        number = row.number
        if number in numbers:
            window.append(row)
            length += _characters(row)
        ends_part = rows_per_part is not None and (number + 1) % (numbers.step * rows_per_part) == 0
        if ends_part or len(window) >= WINDOW_ROWS or length >= characters:
            yield Window(window, number + 1, commits=ends_part or rows_per_part is None)
            window, length = [], 0
    if number >= 0:
        yield Window(window, number + 1)


def _characters(row: InputRow) -> int:
    return sum(
        len(value) if isinstance(value, str) else sum(len(part) for part in value if isinstance(part, str))
        for value in row.values
        if isinstance(value, str | list)
    )

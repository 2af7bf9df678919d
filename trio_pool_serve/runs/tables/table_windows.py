"""The windows of a table's rows, which a run reads one after the other."""

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence

from attrs import frozen

from trio_pool_serve.runs.run import Position, Window
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.input_table import InputTable
from trio_pool_serve.runs.tables.output_rows import OutputColumn

WINDOW_ROWS = 2048

WINDOW_CHARACTERS = 4 * 2**20
"""A window ends with the row by which it has this many: the more rows, the less those of one batch differ in length."""

TOKEN_WINDOW_CHARACTERS = 32 * 2**10
"""The same for a vector for each token: about 8192 vectors of English text, 32 MiB with 1024 numbers each."""


def window_characters(columns: Sequence[OutputColumn]) -> int:
    """Return the characters by which a window ends whose results have these columns."""
    return TOKEN_WINDOW_CHARACTERS if any(column.type == "vectors" for column in columns) else WINDOW_CHARACTERS


@frozen(eq=False, kw_only=True)
class TableWindows:
    """The windows of the rows of a table that have these ``numbers``: up to a limit, or each n-th for one of n shards.

    The output is committed after each window, or after ``rows_per_part`` rows of the table for each shard.
    """

    table: InputTable
    columns: Sequence[str]
    id_column: str | None
    numbers: range
    rows_per_part: int | None
    characters: int = WINDOW_CHARACTERS

    def __call__(self, position: Position) -> Generator[Window[InputRow], None, None]:
        """Yield the windows from a position on. Blocks.

        Raises ``InputChangedError`` if a file was changed since its scan.
        """
        for window in cut_windows(
            self._rows_from(position.line), self.numbers, self.rows_per_part, characters=self.characters
        ):
            self.table.check_read()
            yield window

    def _rows_from(self, start: int) -> Iterator[InputRow]:
        """Yield the rows up to the limit; at the end of the table, check that no file was changed."""
        for row in self.table.rows(self.columns, self.id_column, start):
            if row.number >= self.numbers.stop:
                return
            yield row
        self.table.check_unchanged()


def cut_windows(
    rows: Iterable[InputRow],
    numbers: range = range(sys.maxsize),
    rows_per_part: int | None = None,
    *,
    characters: int = WINDOW_CHARACTERS,
) -> Iterator[Window[InputRow]]:
    """Yield the windows of consecutive rows, of which only ``numbers`` are computed; see ``TableWindows``."""
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

"""One row of an input, and where in a table reading is."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from attrs import define

from trio_pool_serve.errors import BulkInputError

DEFAULT_ID = "id"
"""The id column where none is named, if there is one."""

MAX_ROW_BYTES = 64 * 2**20
"""A longer line or value is an error of its row: a missing quote must not fill the memory."""


class InputRow(msgspec.Struct, frozen=True):
    """A row that was read.

    ``number`` counts over all files, from 0. ``place`` is for people: ``texts.jsonl:17``, the line of a text file or
    the row of others, from 1. ``id`` is the value of the id column, or the number. ``values`` has those of the columns
    that were asked for; it is empty if ``error`` says why the row cannot be used.
    """

    number: int
    place: str
    id: str | int | float | bool
    values: tuple[Any, ...] = ()
    error: str = ""


@define
class Cursor:
    """Where in a table reading is: the number of the next row, and that of the first one that is wanted."""

    start: int = 0
    number: int = 0

    @property
    def skipping(self) -> int:
        """How many rows are still to be skipped."""
        return max(0, self.start - self.number)


def json_id(value: Any) -> str | int | float | bool | None:
    """Return an id that every output can write, or None for a missing one.

    Integers of more than 64 bits become strings: JSON encoders and Arrow refuse them.
    """
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def id_of(found: Any, id_column: str | None, number: int) -> str | int | float | bool | None:
    """Return the id of a row with that number, which it is by default; None for one that is missing and needed.

    Raises ``ValueError`` for what is no id in a column that was named.
    """
    if isinstance(found, list | dict):
        if id_column is None:
            return number
        raise ValueError(f"The column {id_column!r} has a list or an object, which is no id.")
    row_id = json_id(found)
    return number if row_id is None and id_column is None else row_id


def index_of(column: str, names: Sequence[str], file: str) -> int:
    """Return where in a header or schema a column is. Raises ``BulkInputError`` unless it is there once."""
    if names.count(column) != 1:
        many = "more than one column" if column in names else "no column"
        raise BulkInputError(f"{file} has {many} {column!r}. Its columns are: {listed(names)}.")
    return names.index(column)


def listed(names: Iterable[str]) -> str:
    """Return names for an error message, at most twenty of them."""
    found = [repr(name if len(name) <= 100 else f"{name[:100]}…") for name in names]
    return ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")

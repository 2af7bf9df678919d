"""The results of a table's rows, divided among the output and the file of errors."""

from collections.abc import Sequence
from typing import Any

import msgspec

from trio_pool_serve.errors import BulkRowError
from trio_pool_serve.runs.run import OnError
from trio_pool_serve.runs.tables.input_rows import InputRow


class RowResult(msgspec.Struct, frozen=True):
    """The values of the output's columns for a row, after the id; or the error it failed with."""

    values: tuple[Any, ...] = ()
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether there is an error."""
        return bool(self.error)


def divided(
    on_error: OnError, nulls: tuple[None, ...], rows: Sequence[InputRow], results: Sequence[RowResult]
) -> tuple[list[tuple[object, ...]], list[bytes]]:
    """Return the rows of the output, and the lines for the file of errors, as ``on_error`` decides.

    ``nulls`` are the values of a failed row, after its id. Raises ``BulkRowError`` for a failed row if ``on_error`` is
    ``fail``.
    """
    written: list[tuple[object, ...]] = []
    errors: list[bytes] = []
    for row, result in zip(rows, results, strict=True):
        if result.error and on_error == "fail":
            raise BulkRowError(f"{row.place}, id {row.id!r}: {result.error}")
        if result.error:
            errors.append(msgspec.json.encode({"line": row.place, "id": row.id, "reason": result.error}) + b"\n")
        if not result.error or on_error == "null":
            written.append((row.id, *(nulls if result.error else result.values)))
    return written, errors

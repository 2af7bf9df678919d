"""The results of a table's rows, and how they are written: to the output, or to the file of errors."""

from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import define, evolve

from trio_pool_serve.errors import BulkRowError
from trio_pool_serve.runs.run import OnError, Position, Sink
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.output_table import OutputTable
from trio_pool_serve.storage.durable_files import AppendedFile


class RowResult(msgspec.Struct, frozen=True):
    """The values of the output's columns for a row, after the id; or the error it failed with."""

    values: tuple[Any, ...] = ()
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether there is an error."""
        return bool(self.error)


@define(eq=False)
class TableFiles(Sink[InputRow, RowResult]):
    """Writes results to a table, and failed rows to a file of errors, if there is one."""

    output: OutputTable
    errors: AppendedFile | None
    on_error: OnError
    nulls: tuple[None, ...]
    """The values of a row that has failed, after its id."""

    def write(self, rows: Sequence[InputRow], results: Sequence[RowResult]) -> None:
        """Write the results of a window. Raises ``BulkRowError`` for a failed row if ``on_error`` is ``fail``."""
        written: list[tuple[object, ...]] = []
        errors: list[bytes] = []
        for row, result in zip(rows, results, strict=True):
            if not result.error:
                written.append((row.id, *result.values))
                continue
            if self.on_error == "fail":
                raise BulkRowError(f"{row.place}, id {row.id!r}: {result.error}")
            if self.on_error == "null":
                written.append((row.id, *self.nulls))
            errors.append(msgspec.json.encode({"line": row.place, "id": row.id, "reason": result.error}) + b"\n")
        self.output.write(written)
        if self.errors is not None and errors:
            self.errors.append(b"".join(errors))

    def commit(self, position: Position) -> Position:
        """Make the rows durable; return the position with the sizes of the files."""
        position = self.output.commit(position)
        return evolve(position, error_bytes=0 if self.errors is None else self.errors.sync())

"""Parquet and Arrow: a folder of files, each with the rows of one commit."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trio_pool_serve.errors import BulkInputError, StorageError
from trio_pool_serve.runs.tables.arrow_batches import PURPOSE, BatchBuilder
from trio_pool_serve.runs.tables.column_types import OutputColumn, size_of
from trio_pool_serve.runs.tables.line_output import Rows
from trio_pool_serve.runs.tables.position import Position
from trio_pool_serve.runs.tables.table_formats import Format, Kind, import_extra
from trio_pool_serve.storage.durable_files import make_folder, publish, remove_files, storage_errors

TEMPORARY = ".tmp"

GROUP_ROWS = 1024
GROUP_BYTES = 16 * 2**20
"""A row group ends after the row with which it has as many bytes: vectors of tokens are much larger than texts."""

MAX_PARTS = 100_000
"""With five digits, the order of names is that of rows."""


class PartFile:
    """One part that is being written, under a temporary name, a row group or a record batch at a time.

    All methods raise ``StorageError``.
    """

    def __init__(self, path: Path, kind: Kind, schema: Any) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + TEMPORARY)
        with storage_errors(self.temporary):
            self._file = self.temporary.open("wb")
            self._writer = _writer(kind, self._file, schema)

    def write(self, batch: Any) -> None:
        """Append a record batch."""
        with storage_errors(self.temporary):
            self._writer.write_batch(batch)

    def complete(self) -> int:
        """Give the file its name, durably; return its size in bytes."""
        with storage_errors(self.temporary):
            self._writer.close()
            self._file.close()
            size = self.temporary.stat().st_size
        publish(self.temporary, self.path)
        return size

    def discard(self) -> None:
        """Remove what was written; an error is not reported, because a resume removes it, too."""
        for step in (self._writer.close, self._file.close, self.temporary.unlink):
            with suppress(OSError, ValueError):  # ValueError: the writer or the file has been closed
                step()


def _writer(kind: Kind, file: Any, schema: Any) -> Any:
    if kind == "arrow":
        return import_extra("pyarrow", PURPOSE).ipc.new_file(file, schema)
    return import_extra("pyarrow.parquet", PURPOSE).ParquetWriter(
        file, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )


class PartFolder:
    """Writes rows to ``part-00000.parquet`` and so on; only complete parts have these names, and are committed.

    Where row groups begin depends on the rows alone, not on how they are divided among calls.
    """

    def __init__(
        self,
        folder: Path,
        table_format: Format,
        columns: Sequence[OutputColumn],
        position: bytes | None,
    ) -> None:
        self._folder = folder
        self._format = table_format
        self._builder = BatchBuilder(columns)
        self._position = Position.decoded(position)
        self._group: list[Sequence[Any]] = []
        self._group_bytes = 0
        self._part: PartFile | None = None
        with storage_errors(folder):
            self._prepare(fresh=position is None)

    def write(self, rows: Rows) -> None:
        """Write rows, each with a value for each column. Raises ``StorageError``; then only ``close`` is of use."""
        for row in rows:
            self._group.append(row)
            self._group_bytes += size_of(row)
            if len(self._group) == GROUP_ROWS or self._group_bytes >= GROUP_BYTES:
                self._end_group()

    def commit(self) -> bytes:
        """End a part with the rows since the last commit, if there are any; return the position, once it is durable.

        Raises ``StorageError``; then only ``close`` is of use.
        """
        self._end_group()
        if self._part is not None:
            size = self._part.complete()
            self._position = Position(self._position.n_bytes + size, self._position.parts + 1)
            self._part = None
        return self._position.encoded()

    def finish(self) -> bytes:
        """Commit, with an empty part if there were no rows at all; return the last position."""
        self._end_group()
        if self._part is None and not self._position.parts:
            self._part = self._new_part()
        return self.commit()

    def close(self) -> None:
        """Remove the part that is not complete. Complete ones stay, until a resume from a position before them."""
        if self._part is not None:
            self._part.discard()
            self._part = None

    def _end_group(self) -> None:
        if not self._group:
            return
        if self._part is None:
            self._part = self._new_part()
        self._part.write(self._builder.batch(self._group))
        self._group, self._group_bytes = [], 0

    def _new_part(self) -> PartFile:
        if self._position.parts == MAX_PARTS:
            raise StorageError(f"{self._folder} has {MAX_PARTS} parts, which is the most. Use more rows per file.")
        return PartFile(
            part_path(self._folder, self._format, self._position.parts), self._format.kind, self._builder.schema
        )

    def _prepare(self, *, fresh: bool) -> None:
        """Check the parts up to the position, and remove those behind it."""
        make_folder(self._folder)
        found = _matches(self._folder, self._format)
        foreign = sorted(path.name for path, match in found.items() if not match and path.name[0] not in "._")
        if fresh and foreign:
            raise BulkInputError(f"{self._folder} has other files in it ({foreign[0]}): name a new or empty folder.")
        check_parts(self._folder, self._format, self._position)
        remove_files(self._folder, parts_behind(self._folder, self._format, self._position))


def part_path(folder: Path, table_format: Format, part: int) -> Path:
    """Return where a part is."""
    return folder / f"part-{part:05d}{table_format.extension}"


def check_parts(folder: Path, table_format: Format, position: Position) -> None:
    """Raise ``StorageError`` if the parts up to a position are not those that were committed."""
    n_bytes = 0
    for part in range(position.parts):
        path = part_path(folder, table_format, part)
        if not path.is_file():
            raise StorageError(f"{path} has been deleted: it was complete.")
        n_bytes += path.stat().st_size
    if n_bytes != position.n_bytes:
        raise StorageError(
            f"{folder}: its first {position.parts} parts have {n_bytes} bytes, where "
            f"{position.n_bytes} had been written: one of them has been changed."
        )


def parts_behind(folder: Path, table_format: Format, position: Position) -> list[Path]:
    """Return the parts that a position does not cover, with those that are not complete."""
    return sorted(
        path
        for path, match in _matches(folder, table_format).items()
        if match and (match[2] or int(match[1]) >= position.parts)
    )


def _matches(folder: Path, table_format: Format) -> dict[Path, re.Match[str] | None]:
    own = re.compile(rf"part-(\d{{5}}){re.escape(table_format.extension)}(\.tmp)?")
    return {path: own.fullmatch(path.name) for path in folder.iterdir()}

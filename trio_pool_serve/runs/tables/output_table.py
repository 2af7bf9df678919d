"""Results that are written commit by commit: to a file of lines, or to a folder of parts. Everything here blocks."""

import os
import re
import sys
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, evolve

from trio_pool_serve.errors import BulkInputError, StorageError, StorageLostError, require
from trio_pool_serve.runs.run import Position, Result, Row, Sink
from trio_pool_serve.runs.tables.output_rows import (
    LINES_OF,
    WRITING_ARROW,
    BatchBuilder,
    OutputColumn,
    Rows,
    size_of,
)
from trio_pool_serve.runs.tables.table_formats import Compression, Format, Kind, import_extra
from trio_pool_serve.storage.durable_files import (
    AppendedFile,
    make_folder,
    open_appended,
    publish,
    remove_files,
    storage_errors,
)

STANDARD_OUTPUT = Path("Standard output")
"""The name of standard output in messages."""

GZIP_WITH_HEADER = 31
"""The value of zlib's ``wbits``. The header has no name and no time."""

PART = re.compile(r"part-(?P<number>\d{5})(?P<extension>\.parquet|\.arrow)(?P<unfinished>\.tmp)?")
"""Names of files in a folder of parts."""

MAX_PARTS = 100_000
"""The limit of parts: with five digits, the names sort in the order of the rows."""

GROUP_ROWS = 1024
GROUP_BYTES = 16 * 2**20
"""A row group ends with the row that fills it: vectors of tokens are much larger than texts."""


class StandardOutput(AppendedFile):
    """Standard output without a buffer, so that nothing is left to be written when the interpreter ends."""

    @classmethod
    def opened(cls) -> "StandardOutput":
        """Return the output of this process. Raises ``StorageError``."""
        with storage_errors(STANDARD_OUTPUT):
            sys.stdout.flush()
            os.set_blocking(sys.stdout.fileno(), True)  # its reader may be slower than this process
            file = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
        return cls(STANDARD_OUTPUT, file, 0)

    def append(self, data: bytes) -> None:
        """Write all of the data. Raises ``StorageError``."""
        try:
            super().append(data)
        except StorageError as error:
            if not isinstance(error.__cause__, BrokenPipeError):
                raise
            raise StorageError("The reader of standard output closed it before all rows were written.") from error

    def sync(self) -> int:
        """Return the length: a pipe cannot be synced."""
        return self.length


def _zst_member(content: bytes) -> bytes:
    zstandard = import_extra("zstandard", "Writing .zst files")
    return bytes(zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content))


MEMBER_OF: Mapping[Compression, Callable[[bytes], bytes]] = {
    "": bytes,
    "gz": partial(zlib.compress, level=6, wbits=GZIP_WITH_HEADER),
    "zst": _zst_member,
}
"""Returns content as one member of a compressed file."""


class LineOutput:
    """Writes rows as lines at each commit, which ends a member of a compressed file: so each can be read by itself."""

    def __init__(
        self,
        file: AppendedFile,
        lines_of: Callable[[Sequence[Any]], bytes] = b"".join,
        member_of: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._file, self._lines_of, self._member_of = file, lines_of, member_of
        self._pending: list[bytes] = []

    def write(self, rows: Sequence[Any]) -> None:
        """Take rows, which are written at the next commit."""
        self._pending.append(self._lines_of(rows))

    def commit(self, position: Position) -> Position:
        """Make all rows durable. Raises ``StorageError``; then only ``close`` is of use."""
        content = b"".join(self._pending)
        # Once finished, a compressed file has a member, even without rows.
        if content or (position.is_finished and not self._file.length):
            self._file.append(self._member_of(content))
        self._pending = []
        return evolve(position, output_bytes=self._file.sync())

    def close(self) -> None:
        """Close the file. Bytes after the last commit are cut off when it is opened again."""
        self._file.close()


class PartFile:
    """One part while it is written, under a temporary name, a row group or record batch at a time.

    All methods raise ``StorageError``.
    """

    def __init__(self, path: Path, kind: Kind, schema: Any) -> None:
        self.path = path
        self.temporary = path.with_name(f"{path.name}.tmp")
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
        """Remove the file; an error is not reported, because a resumed run removes it, too."""
        for step in (self._writer.close, self._file.close, self.temporary.unlink):
            with suppress(OSError, ValueError):  # ValueError: the writer or the file has been closed
                step()


def _writer(kind: Kind, file: Any, schema: Any) -> Any:
    if kind == "arrow":
        return import_extra("pyarrow", WRITING_ARROW).ipc.new_file(file, schema)
    return import_extra("pyarrow.parquet", WRITING_ARROW).ParquetWriter(
        file, schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )


class PartFolder:
    """Writes rows to ``part-00000.parquet`` and so on, each with the rows of one commit.

    Where row groups begin depends on the rows alone, not on how they are divided among calls.
    """

    def __init__(self, folder: Path, table_format: Format, columns: Sequence[OutputColumn], position: Position) -> None:
        self._folder = folder
        self._format = table_format
        self._builder = BatchBuilder(columns)
        self._n_bytes, self._n_parts = position.output_bytes, position.parts
        self._group: list[Sequence[Any]] = []
        self._group_bytes = 0
        self._part: PartFile | None = None
        with storage_errors(folder):
            make_folder(folder)
            foreign = foreign_files(folder, _parts_in(folder, table_format))
            if foreign and not position.parts:
                raise BulkInputError(f"{folder} contains other files ({foreign[0]}). Name a new or an empty folder.")
            remove_files(folder, _parts_after(folder, table_format, position))

    def write(self, rows: Rows) -> None:
        """Write rows. Raises ``StorageError``; then only ``close`` is of use."""
        for row in rows:
            self._group.append(row)
            self._group_bytes += size_of(row)
            if len(self._group) == GROUP_ROWS or self._group_bytes >= GROUP_BYTES:
                self._end_group()

    def commit(self, position: Position) -> Position:
        """End a part with the rows since the last commit, if there are any, and make it durable.

        A finished output has an empty part if there were no rows at all. Raises ``StorageError``; then only ``close``
        is of use.
        """
        self._end_group()
        if position.is_finished and not self._n_parts:
            self._part = self._part or self._new_part()
        if self._part is not None:
            self._n_bytes += self._part.complete()
            self._n_parts += 1
            self._part = None
        return evolve(position, output_bytes=self._n_bytes, parts=self._n_parts)

    def close(self) -> None:
        """Remove the part that is not complete. Complete ones stay, until writing resumes before them."""
        if self._part is not None:
            self._part.discard()

    def _end_group(self) -> None:
        if not self._group:
            return
        self._part = self._part or self._new_part()
        self._part.write(self._builder.batch(self._group))
        self._group, self._group_bytes = [], 0

    def _new_part(self) -> PartFile:
        require(
            self._n_parts < MAX_PARTS,
            f"{self._folder} contains {MAX_PARTS} parts, which is the limit. Increase --rows-per-file.",
            StorageError,
        )
        path = _part_path(self._folder, self._format, self._n_parts)
        return PartFile(path, self._format.kind, self._builder.schema)


def _part_path(folder: Path, table_format: Format, part: int) -> Path:
    return folder / f"part-{part:05d}.{table_format}"


def _parts_in(folder: Path, table_format: Format) -> dict[Path, int]:
    """Return the parts of a format with their numbers; for an incomplete one that is ``MAX_PARTS``."""
    found = {path: PART.fullmatch(path.name) for path in folder.iterdir()}
    return {
        path: MAX_PARTS if match["unfinished"] else int(match["number"])
        for path, match in found.items()
        if match and match["extension"] == f".{table_format}"
    }


def foreign_files(folder: Path, own: Container[Path]) -> list[str]:
    """Return the names of a folder's other files, except hidden ones and markers of Spark and Hive."""
    return sorted(path.name for path in folder.iterdir() if path not in own and path.name[0] not in "._")


def _parts_after(folder: Path, table_format: Format, position: Position) -> list[Path]:
    """Return the parts that are not committed, complete or not.

    Raises ``StorageError`` if committed ones are missing, or have another size.
    """
    n_bytes = 0
    for part in range(position.parts):
        path = _part_path(folder, table_format, part)
        require(path.is_file(), f"{path} was complete, but has been deleted.", StorageError)
        n_bytes += path.stat().st_size
    require(
        n_bytes == position.output_bytes,
        f"{folder}: the first {position.parts} parts have {n_bytes} bytes, but {position.output_bytes} bytes were "
        "written. One of them has been changed.",
        StorageError,
    )
    return sorted(path for path, number in _parts_in(folder, table_format).items() if number >= position.parts)


OutputTable: TypeAlias = LineOutput | PartFolder
"""Rows in a file or in a folder of parts; the same rows and commits give the same bytes.

``commit`` returns the position with ``output_bytes``, the length of the file or of all ``parts`` together. Their
methods raise ``StorageError`` if the disk is full, for example. Committed rows are still there then, and the output can
be opened again after them.
"""


def open_output(
    path: Path | None, table_format: Format, columns: Sequence[OutputColumn], position: Position
) -> OutputTable:
    """Open an output to continue at a position: later rows are removed, as are files of an earlier run.

    ``path`` is a file for JSONL and CSV, None for standard output, and a folder for Parquet and Arrow, with a file for
    each commit. Raises ``BulkInputError`` for a new folder with other files in it, and ``StorageError`` if committed
    rows are no longer there.
    """
    if table_format.in_lines:
        file = StandardOutput.opened() if path is None else open_appended(path, position.output_bytes)
        lines = LineOutput(file, partial(LINES_OF[table_format.kind], columns), MEMBER_OF[table_format.compression])
        if table_format.kind != "jsonl" and not position.output_bytes:
            lines.write([[column.name for column in columns]])
        return lines
    if path is None:
        raise BulkInputError(
            f"{table_format} cannot be written to standard output. Use jsonl or csv, or name a folder."
        )
    return PartFolder(path, table_format, columns, position)


def open_lines(path: Path, position: Position) -> LineOutput:
    """Open a file of lines, to be written as they are, at a position. Raises ``StorageError``."""
    return LineOutput(open_appended(path, position.output_bytes))


@define(eq=False)
class ResultFiles(Sink[Row, Result]):
    """Writes results to an output, and errors of failed rows to a file of errors, if there is one."""

    output: OutputTable
    errors: AppendedFile | None
    divide: Callable[[Sequence[Row], Sequence[Result]], tuple[Sequence[Any], Sequence[bytes]]]
    """Returns the rows for the output, and the lines for the file of errors."""

    @classmethod
    @contextmanager
    def open(
        cls,
        open_output: Callable[[Position], OutputTable],
        errors: Path | None,
        divide: Callable[[Sequence[Row], Sequence[Result]], tuple[Sequence[Any], Sequence[bytes]]],
        position: Position,
    ) -> Iterator["ResultFiles[Row, Result]"]:
        """Open the files at a position, at which they are cut off, for the block. Raises ``StorageError``."""
        with (
            closing(open_output(position)) as output,
            nullcontext() if errors is None else closing(open_appended(errors, position.error_bytes)) as of_errors,
        ):
            yield cls(output, of_errors, divide)

    def write(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        """Write the results of a window. Raises as ``divide``."""
        written, errors = self.divide(rows, results)
        self.output.write(written)
        if self.errors is not None:
            self.errors.append(b"".join(errors))

    def commit(self, position: Position) -> Position:
        """Make the results durable; return the position with the sizes of the files."""
        position = self.output.commit(position)
        return evolve(position, error_bytes=0 if self.errors is None else self.errors.sync())


def check_finished(path: Path, table_format: Format, position: Position) -> None:
    """Raise ``StorageLostError`` if the output of a complete run has changed since. Nothing is opened."""
    try:
        with storage_errors(path):
            require(path.exists(), f"{path} has been deleted.", StorageLostError)
            added = [] if table_format.in_lines else _parts_after(path, table_format, position)
            if added:
                raise StorageLostError(f"{added[0]} was added; the run wrote {position.parts} parts.")
            size = path.stat().st_size
            if table_format.in_lines and size != position.output_bytes:
                raise StorageLostError(f"{path} has {size} bytes, but {position.output_bytes} bytes were written.")
    except StorageError as error:
        raise StorageLostError(
            f"The run was complete, but its output has been changed. {error} To start again, use --overwrite."
        ) from error

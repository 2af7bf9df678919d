"""JSON lines and CSV: one file that grows at its end, or standard output, compressed or not."""

import csv
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trio_pool_serve.errors import StorageError
from trio_pool_serve.runs.tables.column_types import OutputColumn, as_written
from trio_pool_serve.runs.tables.position import Position
from trio_pool_serve.runs.tables.table_formats import Compression, Format, Kind, import_extra
from trio_pool_serve.storage.durable_files import AppendedFile, open_appended

Rows = Sequence[Sequence[Any]]

WRITING_ZSTD = "Writing .zst files"


class LineEncoder:
    """Encodes rows of the same columns as JSON objects, or as cells after RFC 4180 in which lists are JSON."""

    def __init__(self, kind: Kind, columns: Sequence[OutputColumn]) -> None:
        self._columns = columns
        self._delimiter = {"csv": ",", "tsv": "\t"}.get(kind)

    def header(self) -> bytes:
        """Return the line before the rows."""
        return self._cells([[column.name for column in self._columns]]) if self._delimiter else b""

    def lines(self, rows: Rows) -> bytes:
        """Return the lines of rows."""
        if self._delimiter:
            return self._cells([[_cell(column, value) for column, value in self._pairs(row)] for row in rows])
        return b"".join([self._object(row) for row in rows])

    def _pairs(self, row: Sequence[Any]) -> list[tuple[OutputColumn, Any]]:
        return list(zip(self._columns, row, strict=True))

    def _object(self, row: Sequence[Any]) -> bytes:
        values = {column.name: _json_value(column, value) for column, value in self._pairs(row)}
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)

    def _cells(self, rows: list[list[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter or ",", lineterminator="\r\n").writerows(rows)
        return text.getvalue().encode()


def _json_value(column: OutputColumn, value: Any) -> Any:
    if value is None:
        return None
    if column.type == "number":
        return np.float32(value)  # which is written with the digits that tell it from other float32 numbers
    array = as_written(column, value)
    if column.type == "sparse":
        indices, scores = array
        return [{"index": index, "score": score} for index, score in zip(indices.tolist(), scores, strict=True)]
    return array


def _cell(column: OutputColumn, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return orjson.dumps(_json_value(column, value), option=orjson.OPT_SERIALIZE_NUMPY).decode()


class LineOutput:
    """Writes rows as lines, at a commit, which ends a member of a compressed file: so each is of use by itself."""

    def __init__(
        self, path: Path | None, table_format: Format, columns: Sequence[OutputColumn], position: bytes | None
    ) -> None:
        self._path = path
        self._encoder = LineEncoder(table_format.kind, columns)
        self._compression = table_format.compression
        if self._compression == "zst":
            import_extra("zstandard", WRITING_ZSTD)  # it is known before the run whether it is there
        self._file: AppendedFile | StandardOutput = (
            StandardOutput() if path is None else open_appended(path, Position.decoded(position).n_bytes)
        )
        self._pending = [] if self._file.length else [self._encoder.header()]

    def write(self, rows: Rows) -> None:
        """Take rows, each with a value or None for each column."""
        self._pending.append(self._encoder.lines(rows))

    def commit(self) -> bytes:
        """Make all rows durable; return the position, b"" for standard output.

        Raises ``StorageError``; then only ``close`` is of use.
        """
        if content := b"".join(self._pending):
            self._file.append(_member_of(content, self._compression))
        self._pending = []
        length = self._file.sync()
        return b"" if self._path is None else Position(length).encoded()

    def finish(self) -> bytes:
        """Commit, once all rows are written; return the last position. Raises ``StorageError``."""
        if not self._file.length and not any(self._pending):
            self._file.append(_member_of(b"", self._compression))  # a compressed file has a member, even without rows
        return self.commit()

    def close(self) -> None:
        """Close the file. What was written since the last commit is cut off when it is opened at its position."""
        self._file.close()


@contextmanager
def _pipe_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise StorageError("Standard output was closed by its reader before all rows were written.") from error
    except OSError as error:
        raise StorageError(f"Standard output: {error.strerror or error}.") from error


class StandardOutput:
    """Writes without a buffer, so that nothing is left to be written when the interpreter ends."""

    def __init__(self) -> None:
        self.length = 0
        with _pipe_errors():
            sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()

    def append(self, data: bytes) -> None:
        """Write all of the data. Raises ``StorageError``."""
        with _pipe_errors():
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        self.length += len(data)

    def sync(self) -> int:
        """Return the length; there is nothing to wait for."""
        return self.length

    def close(self) -> None:
        """Leave it open: it belongs to the process."""


GZIP_WITH_HEADER = 31
"""What zlib calls its window bits. The header has no name and no time."""


def _member_of(content: bytes, compression: Compression) -> bytes:
    """Return content as one member of a compressed file, or as it is where nothing is compressed."""
    if compression == "gz":
        return zlib.compress(content, level=6, wbits=GZIP_WITH_HEADER)
    if compression == "zst":
        zstandard = import_extra("zstandard", WRITING_ZSTD)
        return bytes(zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content))
    return content

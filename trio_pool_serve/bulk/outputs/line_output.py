"""JSON lines and CSV: one file that grows at its end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve

from trio_pool_serve.bulk.outputs.column_types import OutputColumn
from trio_pool_serve.bulk.outputs.compressed_members import CompressedMembers
from trio_pool_serve.bulk.outputs.line_encoding import LineEncoder, Rows
from trio_pool_serve.bulk.outputs.position import Position, decoded_position
from trio_pool_serve.bulk.outputs.standard_output import StandardOutput
from trio_pool_serve.bulk.table_formats import Format
from trio_pool_serve.errors import StorageError
from trio_pool_serve.storage.durable_files import AppendedFile, open_appended


class LineOutput:
    """Writes rows as lines. A commit ends a member of a compressed file, so each is of use by itself."""

    def __init__(
        self, path: Path | None, table_format: Format, columns: Sequence[OutputColumn], position: bytes | None
    ) -> None:
        self._path = path
        self._position = decoded_position(position, Position(format=str(table_format)))
        self._rows = self._position.rows
        self._encoder = LineEncoder(table_format.kind, columns)
        self._members = CompressedMembers(table_format.compression)
        self._failed = False
        self._file: AppendedFile | StandardOutput = (
            StandardOutput() if path is None else open_appended(path, self._position.n_bytes)
        )
        if not self._position.n_bytes and (header := self._encoder.header()):
            self._append(self._members.add(header))

    def write(self, rows: Rows) -> None:
        """Write rows, each with a value for each column. Raises ``StorageError``; then only ``close`` is of use."""
        self._check_open()
        self._append(self._members.add(self._encoder.lines(rows)))
        self._rows += len(rows)

    def commit(self) -> bytes:
        """Make all rows durable; return the position. Raises ``StorageError``."""
        return self._commit(finished=False)

    def finish(self) -> bytes:
        """Commit, once all rows are written; return the last position. Raises ``StorageError``."""
        if not self._file.length:
            self._members.add(b"")  # a compressed file has a member, even if there are no rows
        return self._commit(finished=True)

    def close(self) -> None:
        """Close the file. What was written since the last commit is cut off when it is opened at its position."""
        self._file.close()

    def _commit(self, *, finished: bool) -> bytes:
        self._check_open()
        self._append(self._members.end_member())
        with self._remembered_failure():
            length = self._file.sync()
        self._position = evolve(self._position, rows=self._rows, n_bytes=length, finished=finished)
        return b"" if self._path is None else self._position.encoded()

    def _append(self, data: bytes) -> None:
        with self._remembered_failure():
            self._file.append(data)

    def _check_open(self) -> None:
        if self._failed:
            raise StorageError(f"{self._path or 'Standard output'}: an earlier write has failed.")
        if self._position.finished:
            raise ValueError("The output is finished.")

    @contextmanager
    def _remembered_failure(self) -> Iterator[None]:
        """After a failure it is not known what is in the file behind the last commit."""
        try:
            yield
        except StorageError:
            self._failed = True
            raise

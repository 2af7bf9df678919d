"""A table in files, read row by row. Everything here blocks."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from attrs import define, field

from trio_pool_serve.errors import BulkInputError, InputChangedError
from trio_pool_serve.runs.tables.arrow_rows import arrow_rows, count_arrow_rows
from trio_pool_serve.runs.tables.compressed_files import READ_BYTES, decompressed, read_errors
from trio_pool_serve.runs.tables.fingerprint import FilePrint, Fingerprint
from trio_pool_serve.runs.tables.input_files import InputFile, find_files
from trio_pool_serve.runs.tables.input_rows import InputRow, RowsOfFile, Selection, csv_rows, jsonl_rows
from trio_pool_serve.runs.tables.table_formats import Format

DIGEST_BYTES = 32


def open_input(
    source: str,
    *,
    format: str | None = None,  # noqa: A002
    left_out: frozenset[Path] = frozenset(),
) -> "InputTable":
    """Find the files of a table; those of a dataset on the hub are downloaded.

    ``source`` is a path; a glob, whose files are sorted by name; ``-`` for standard input, which needs a format; a
    folder of files, such as one that ``open_output`` wrote; a folder of ``save_to_disk``; or
    ``hf://datasets/OWNER/NAME[@REVISION][/GLOB]``. ``format`` is ``jsonl``, ``csv``, ``tsv``, ``parquet`` or ``arrow``,
    the first three also with ``.gz`` or ``.zst``; without one, the extension decides. Files that are ``left_out``,
    by resolved paths, are not among those that a glob or a folder stands for. Raises ``BulkInputError``.
    """
    files, found = find_files(source, format, left_out)
    return InputTable(found, files)


@define(eq=False)
class InputTable:
    """Files of one format. It holds no file open except while it is read; standard input can be read once."""

    format: Format
    files: tuple[InputFile, ...]
    _rows_of_file: dict[str, int] = field(factory=dict, init=False)
    """As far as they have been scanned."""
    _prints: dict[str, FilePrint] = field(factory=dict, init=False)
    """By name, of scanned files."""
    _reading: InputFile | None = field(default=None, init=False)
    _was_read: bool = field(default=False, init=False)

    @property
    def is_stdin(self) -> bool:
        """Whether the table is standard input: it is not scanned, and a run cannot be resumed."""
        return self.files[0].path is None

    @property
    def n_bytes(self) -> int | None:
        """The size of all files now, compressed as they are; None for standard input. Raises ``BulkInputError``."""
        if self.is_stdin:
            return None
        return sum(_state(file)[0] for file in self.files)

    def scan(self, progress: Callable[[int], None]) -> Fingerprint:
        """Read every byte once; call ``progress`` with how many bytes have been read so far, of ``n_bytes``.

        Of standard input nothing is read; the fingerprint has no files. Raises ``BulkInputError`` for a damaged file,
        ``InputChangedError`` for one that changes meanwhile.
        """
        if self.is_stdin:
            return Fingerprint()
        done = 0
        for file in self.files:
            self._scan_file(file, lambda n_bytes, before=done: progress(before + n_bytes))  # type: ignore[misc]
            done += self._prints[file.name].n_bytes
        return Fingerprint(tuple(self._prints.values()), sum(self._rows_of_file.values()))

    def check_unchanged(self) -> None:
        """Raise ``InputChangedError`` if a file has another size or modification time than when it was scanned."""
        for file in self.files:
            self._check(file)

    def rows(self, columns: Sequence[str], id_column: str | None, start: int = 0) -> Iterator[InputRow]:
        """Yield the rows from number ``start`` on.

        An id is the value of ``id_column``; if that is None, of the column ``id`` where there is one; or else the row's
        number. Rows that cannot be used have an ``error``: lines that are not JSON or not UTF-8, null, a line or value
        of more than 64 MiB; for JSONL, where each line has columns of its own, also a missing column. Files that were
        scanned are skipped without being read, and so are row groups of Parquet; of others, the rows before ``start``
        are read. Arrow files are held in memory one record batch at a time, only the columns asked for.

        Raises ``BulkInputError`` for a damaged file, and for a missing column where a header or schema has columns;
        ``InputChangedError`` at the end of a file that was changed since its scan; ``check_read`` tells earlier.
        """
        number = 0
        for file in self.files:
            skip, n_rows = max(0, start - number), self._rows_of_file.get(file.name)
            if n_rows is not None and n_rows <= skip:
                number += n_rows
                continue
            with read_errors(file.name), self._opened(file) as opened:
                self._reading = file
                number += yield from self._rows_in(opened, Selection(file.name, columns, id_column, number, skip))
                self._check(file)

    def check_read(self) -> None:
        """Raise ``InputChangedError`` if the file that is read was changed since its scan."""
        if self._reading is not None:
            self._check(self._reading)

    def _check(self, file: InputFile) -> None:
        if scanned := self._prints.get(file.name):
            _check_state(file, (scanned.n_bytes, scanned.mtime_ns))

    @contextmanager
    def _opened(self, file: InputFile) -> Iterator[BinaryIO]:
        if file.path is not None:
            with file.path.open("rb", buffering=READ_BYTES) as opened:
                yield opened
            return
        if self._was_read:
            raise BulkInputError("Standard input can be read only once.")
        self._was_read = True
        yield sys.stdin.buffer

    def _rows_in(self, opened: BinaryIO, selection: Selection) -> RowsOfFile:
        kind = self.format.kind
        if not self.format.in_lines:
            return arrow_rows(opened, kind, selection)
        content = decompressed(opened, self.format.compression)
        if kind == "jsonl":
            return jsonl_rows(content, selection)
        return csv_rows(content, "\t" if kind == "tsv" else ",", selection)

    def _scan_file(self, file: InputFile, progress: Callable[[int], None]) -> None:
        with read_errors(file.name), self._opened(file) as opened:
            before = _state(file)
            hashed = HashedFile(opened, progress)
            self._rows_of_file[file.name] = self._count(opened, hashed, file.name)
            hashed.read_to_end()
        _check_state(file, before)
        self._prints[file.name] = FilePrint(file.name, before[0], hashed.digest, before[1])

    def _count(self, opened: BinaryIO, hashed: "HashedFile", name: str) -> int:
        if not self.format.in_lines:
            n_rows = count_arrow_rows(opened, name, self.format.kind)
            opened.seek(0)
            return n_rows
        try:
            next(self._rows_in(io.BufferedReader(hashed, READ_BYTES), Selection(name, (), None, 0, skip=sys.maxsize)))
        except StopIteration as end:
            return int(end.value)
        raise AssertionError  # no row is yielded


class HashedFile(io.RawIOBase):
    """What is read of a file, hashed and counted on the way."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file = file
        self._progress = progress
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._n_bytes = 0

    @property
    def digest(self) -> str:
        """The digest of what has been read so far, in hexadecimal."""
        return self._digest.hexdigest()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were written to it, 0 at the end."""
        n = self._file.readinto(buffer)  # type: ignore[attr-defined]  # a buffered file has it
        self._digest.update(memoryview(buffer)[:n])
        self._n_bytes += n
        self._progress(self._n_bytes)
        return int(n)

    def read_to_end(self) -> None:
        """Read what others have left."""
        buffer = bytearray(READ_BYTES)
        while self.readinto(buffer):
            pass


def _state(file: InputFile) -> tuple[int, int]:
    assert file.path is not None  # noqa: S101  (standard input is not scanned)
    try:
        found = file.path.stat()
    except OSError as error:
        raise InputChangedError(f"{file.path} cannot be found any longer: {error.strerror}.") from error
    return found.st_size, found.st_mtime_ns


def _check_state(file: InputFile, expected: tuple[int, int]) -> None:
    found = _state(file)
    if found != expected:
        raise InputChangedError(
            f"{file.path} was changed while it was being read: it has {found[0]} bytes, where it had {expected[0]}."
            if found[0] != expected[0]
            else f"{file.path} was changed while it was being read: it was written to."
        )

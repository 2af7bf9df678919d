"""A table in files, read row by row. Everything here blocks."""

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

from attrs import define, field, frozen

from trio_pool_serve.errors import BulkInputError, InputChangedError, require
from trio_pool_serve.runs.tables.arrow_rows import arrow_rows, ipc_batches, parquet_batches
from trio_pool_serve.runs.tables.input_files import InputFile, find_files
from trio_pool_serve.runs.tables.input_rows import InputRow, RowsOfFile, Selection, csv_rows, jsonl_rows
from trio_pool_serve.runs.tables.table_formats import Compression, Format, Kind, import_extra

READ_BYTES = 2**18


@frozen
class FilePrint:
    """A file: its name below the source, its size, the BLAKE2b digest of its bytes, and its modification time."""

    name: str
    n_bytes: int
    blake2b: str
    mtime_ns: int


@frozen
class Fingerprint:
    """All files of a table as they were scanned, and their number of rows, or None if it is unknown.

    Standard input has no files here: it cannot be read twice. msgspec encodes and decodes fingerprints.
    """

    files: tuple[FilePrint, ...] = ()
    rows: int | None = None

    def changes(self, other: "Fingerprint") -> str:
        """Return how another, later fingerprint differs, as sentences; "" for the same content under the same names."""
        before = {file.name: file for file in self.files}
        after = {file.name: file for file in other.files}
        sentences = [f"{name} was removed." for name in before if name not in after]
        sentences += [f"{name} was added." for name in after if name not in before]
        sentences += [
            f"The content of {name} has changed."
            if was.n_bytes == after[name].n_bytes
            else f"{name} has {after[name].n_bytes} bytes, but had {was.n_bytes}."
            for name, was in before.items()
            if name in after and was.blake2b != after[name].blake2b
        ]
        return " ".join(sentences)


def open_input(
    source: str,
    *,
    format: str | None = None,  # noqa: A002
    left_out: frozenset[Path] = frozenset(),
) -> "InputTable":
    """Find the files of a table; a dataset on the hub is downloaded.

    ``source`` is a path; a glob, whose files are sorted by name; ``-`` for standard input, which needs a format; a
    folder of files, such as one that ``open_output`` wrote; a folder of ``save_to_disk``; or
    ``hf://datasets/OWNER/NAME[@REVISION][/GLOB]``. ``format`` is ``jsonl``, ``csv``, ``tsv``, ``parquet`` or ``arrow``,
    the first three also with ``.gz`` or ``.zst``; without one, the extension decides. Files that are ``left_out``,
    by resolved paths, do not count in a glob or a folder. Raises ``BulkInputError``.
    """
    return InputTable(*find_files(source, format, left_out))


@define(eq=False)
class InputTable:
    """Files of one format. It holds no file open except while it is read; standard input can be read once."""

    files: tuple[InputFile, ...]
    format: Format
    _scanned: dict[str, tuple[FilePrint, int]] = field(factory=dict, init=False)
    """The scanned files by name, with their numbers of rows."""
    _reading: InputFile | None = field(default=None, init=False)
    _was_read: bool = field(default=False, init=False)

    @property
    def is_stdin(self) -> bool:
        """Whether the table is standard input: it is not scanned, and a run cannot be resumed."""
        return self.files[0].path is None

    @property
    def n_bytes(self) -> int | None:
        """The size of all files now, compressed as they are; None for standard input. Raises ``BulkInputError``."""
        return None if self.is_stdin else sum(_state(file)[0] for file in self.files)

    def scan(self, progress: Callable[[int], None]) -> Fingerprint:
        """Read every byte once; call ``progress`` with the number of bytes read so far, of ``n_bytes``.

        Standard input is not read; its fingerprint has no files. Raises ``BulkInputError`` for a damaged file,
        ``InputChangedError`` for one that changes meanwhile.
        """
        if self.is_stdin:
            return Fingerprint()
        done = 0
        for file in self.files:
            found, _ = self._scanned[file.name] = self._scan_file(file, done, progress)
            self._check(file)
            done += found.n_bytes
        prints, counts = zip(*self._scanned.values(), strict=True)
        return Fingerprint(prints, sum(counts))

    def check_unchanged(self) -> None:
        """Raise ``InputChangedError`` if a file has another size or modification time than when it was scanned."""
        for file in self.files:
            self._check(file)

    def rows(self, columns: Sequence[str], id_column: str | None, start: int = 0) -> Iterator[InputRow]:
        """Yield the rows from number ``start`` on.

        An id is the value of ``id_column``; if that is None, of the column ``id`` if there is one, or else the row's
        number. Rows that cannot be used have an ``error``: lines that are not JSON or not UTF-8, null, a line or value
        of more than 64 MiB; in JSONL, where each line has columns of its own, also a missing column. Scanned files
        before ``start`` are skipped without being read, and so are row groups of Parquet; in other files, the rows
        before it are read. Arrow files are in memory one record batch at a time, only the columns asked for.

        Raises ``BulkInputError`` for a damaged file, and for a missing column if a header or schema lists columns;
        ``InputChangedError`` at the end of a file that has changed since its scan; ``check_read`` raises it earlier.
        """
        number = 0
        for file in self.files:
            skip = max(0, start - number)
            _, n_rows = self._scanned.get(file.name, (None, sys.maxsize))
            if n_rows <= skip:
                number += n_rows
                continue
            with read_errors(file.name), self._opened(file) as opened:
                self._reading = file
                number += yield from self._rows_in(opened, Selection(file.name, columns, id_column, number, skip))
                self._check(file)
        self._reading = None

    def check_read(self) -> None:
        """Raise ``InputChangedError`` if the file being read has changed since its scan."""
        if self._reading is not None:
            self._check(self._reading)

    def _check(self, file: InputFile) -> None:
        if file.name not in self._scanned:
            return
        scanned, _ = self._scanned[file.name]
        n_bytes, mtime_ns = _state(file)
        if n_bytes != scanned.n_bytes or mtime_ns != scanned.mtime_ns:
            sizes = f"it has {n_bytes} bytes, but had {scanned.n_bytes}"
            change = sizes if n_bytes != scanned.n_bytes else "it was written to"
            raise InputChangedError(f"{file.path} was changed while it was read: {change}.")

    def _opened(self, file: InputFile) -> AbstractContextManager[BinaryIO]:
        if file.path is not None:
            return file.path.open("rb", buffering=READ_BYTES)
        require(not self._was_read, "Standard input can be read only once.", BulkInputError)
        self._was_read = True
        return nullcontext(sys.stdin.buffer)

    def _rows_in(self, opened: BinaryIO, selection: Selection) -> RowsOfFile:
        return ROWS_OF[self.format.kind](CONTENT_OF[self.format.compression](opened), selection)

    def _scan_file(self, file: InputFile, done: int, progress: Callable[[int], None]) -> tuple[FilePrint, int]:
        with read_errors(file.name), self._opened(file) as opened:
            n_bytes, mtime_ns = _state(file)
            hashed = HashedFile(opened, done, progress)
            n_rows = self._count(io.BufferedReader(hashed, READ_BYTES) if self.format.in_lines else opened, file.name)
            if not self.format.in_lines:
                opened.seek(0)
            while hashed.read(READ_BYTES):
                pass
        return FilePrint(file.name, n_bytes, hashed.digest.hexdigest(), mtime_ns), n_rows

    def _count(self, content: BinaryIO, name: str) -> int:
        try:
            next(self._rows_in(content, Selection(name, (), None, 0, skip=sys.maxsize)))
        except StopIteration as end:
            return int(end.value)
        raise AssertionError  # all rows are skipped


@define(eq=False, slots=False)
class HashedFile(io.RawIOBase):
    """A file whose bytes are hashed while they are read; ``progress`` is called with ``done`` plus the bytes so far."""

    file: BinaryIO
    done: int
    progress: Callable[[int], None]
    digest: blake2b = field(init=False, factory=partial(blake2b, digest_size=32))

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return how many bytes were written to it, 0 at the end."""
        n = self.file.readinto(buffer)  # type: ignore[attr-defined]  # a buffered file has it
        self.digest.update(memoryview(buffer)[:n])
        self.done += n
        self.progress(self.done)
        return int(n)


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Raise ``BulkInputError`` with the name of the file for errors of the system and of decompression."""
    try:
        yield
    except OSError as error:
        raise BulkInputError(f"{name}: {error.strerror or error}.") from error
    except (EOFError, zlib.error) as error:
        raise BulkInputError(f"{name} is truncated or damaged: {str(error).removesuffix('.')}.") from error


def _zst_content(file: BinaryIO) -> BinaryIO:
    return io.BufferedReader(
        import_extra("pyarrow", "Reading .zst files").CompressedInputStream(file, "zstd"), READ_BYTES
    )


CONTENT_OF: Mapping[Compression, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda file: file,
    "gz": lambda file: cast("BinaryIO", gzip.GzipFile(fileobj=file)),
    "zst": _zst_content,
}
"""Returns the content of all members or frames of a file; a damaged one raises ``EOFError`` or ``OSError``."""

ROWS_OF: Mapping[Kind, Callable[[BinaryIO, Selection], RowsOfFile]] = {
    "jsonl": jsonl_rows,
    "csv": partial(csv_rows, delimiter=","),
    "tsv": partial(csv_rows, delimiter="\t"),
    "parquet": partial(arrow_rows, batches=parquet_batches),
    "arrow": partial(arrow_rows, batches=ipc_batches),
}


def _state(file: InputFile) -> tuple[int, int]:
    assert file.path is not None  # noqa: S101  (standard input is not scanned)
    try:
        found = file.path.stat()
    except OSError as error:
        raise InputChangedError(f"{file.path} can no longer be found: {error.strerror}.") from error
    return found.st_size, found.st_mtime_ns

"""Files that exist at the output of a run: an earlier run's, or others."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from trio_pool_serve.bulk.bulk_options import errors_path, journal_path
from trio_pool_serve.errors import BulkInputError, StorageInUseError, require
from trio_pool_serve.runs.tables.output_table import PART, foreign_files


def check_output(
    path: Path,
    *,
    inputs: Iterable[Path],
    overwrite: bool,
    in_parts: bool = False,
    keeps_journal: bool = True,
    beside: Iterable[Path] = (),
) -> None:
    """Remove an output to overwrite, and the files ``beside`` it; reject one without a journal.

    In a folder only the parts are removed. Raises ``BulkInputError`` before anything is removed if the run would write
    to one of the ``inputs``, if a folder has other files, and for a folder in place of a file; ``StorageInUseError``
    rather than removing the output of a run that has not ended. Blocking.
    """
    require(path.parent.is_dir(), f"The folder {path.parent} of the output does not exist.", BulkInputError)
    journal = journal_path(path)
    written = (path, *beside, journal)
    _check_inputs(inputs, written)
    for found in written:
        require(
            not found.is_dir() or (in_parts and found == path),
            f"{found} is a folder, but this run writes a file there. Name a file as the output.",
            BulkInputError,
        )
    if overwrite:
        _is_of_a_run(journal)  # raises if the run has not ended
        parts = _parts(path)
        foreign = foreign_files(path, parts) if path.is_dir() else []
        if foreign:
            raise BulkInputError(
                f"{path} contains other files ({foreign[0]}), which --overwrite does not remove. Name a new folder."
            )
        for found in (*parts, *beside, *_journal_files(path)):
            found.unlink(missing_ok=True)
    elif path.exists() and not (keeps_journal and _is_of_a_run(journal)) and (not path.is_dir() or any(path.iterdir())):
        raise BulkInputError(
            f"{path} exists, but without the journal of a run to resume. To replace it, use --overwrite."
        )


def files_of_run(path: Path | None) -> frozenset[Path]:
    """Return the files that an earlier run wrote for this output, resolved; none without its journal. Blocking.

    They are no part of a run's input, even if they match its glob. None is standard output.
    """
    if path is None or not journal_path(path).exists():
        return frozenset()
    return frozenset(found.resolve() for found in (*_parts(path), errors_path(path), *_journal_files(path)))


def _check_inputs(inputs: Iterable[Path], written: Iterable[Path]) -> None:
    places = {path.resolve(): path for path in written}
    for file in inputs:
        resolved = file.resolve()
        for place in (resolved, *resolved.parents):
            if place in places:
                where = "is the input" if place == resolved else f"contains the input {file}"
                raise BulkInputError(
                    f"The output {places[place]} {where}, which would be overwritten. Name another output."
                )


def _journal_files(path: Path) -> list[Path]:
    journal = journal_path(path)
    return [journal.with_name(f"{journal.name}{end}") for end in ("", "-wal", "-shm", "-journal")]


def _parts(path: Path) -> list[Path]:
    """Return the parts in a folder, or the output that is a file."""
    if not path.is_dir():
        return [path]
    return [part for part in path.iterdir() if PART.fullmatch(part.name) and not part.is_dir()]


def _is_of_a_run(journal: Path) -> bool:
    """Return whether a journal is of a run; a damaged one counts, and is reported when it is opened.

    A journal that was copied without its write-ahead log may be empty. Raises ``StorageInUseError`` during a run.
    """
    if not journal.exists():
        return False
    try:
        with closing(sqlite3.connect(journal, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            return connection.execute("SELECT 1 FROM run").fetchone() is not None
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StorageInUseError(f"Another run is writing this output: {journal} is in use.") from error
        return error.sqlite_errorcode != sqlite3.SQLITE_ERROR  # which is that there is no such table

"""What an earlier run, or something else, has left where a run is to write."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from trio_pool_serve.bulk.bulk_options import errors_path, journal_path
from trio_pool_serve.errors import BulkInputError, StorageInUseError
from trio_pool_serve.storage.database import SETTINGS

PART = re.compile(r"part-\d{5}\.(parquet|arrow)(\.tmp)?")


def check_output(
    path: Path,
    *,
    inputs: Iterable[Path],
    overwrite: bool,
    in_parts: bool = False,
    keeps_journal: bool = True,
    beside: Iterable[Path] = (),
) -> None:
    """Remove an output that is to be overwritten, and the files ``beside`` it; refuse one that no journal knows.

    Of a folder only the parts are removed. Raises ``BulkInputError`` before anything is removed if one of the
    ``inputs`` is among what the run writes, if a folder has other files, and for a folder where a file is to be
    written; ``StorageInUseError`` rather than removing what another run is writing. Blocking.
    """
    if not path.parent.is_dir():
        raise BulkInputError(f"The folder {path.parent} does not exist.")
    journal = journal_path(path)
    written = (path, *beside, journal)
    _check_inputs(inputs, written)
    for found in written:
        if found.is_dir() and not (in_parts and found == path):
            raise BulkInputError(f"{found} is a folder, where a file is to be written: name a file.")
    if overwrite:
        _check_unused(journal)
        parts = _parts(path) if path.is_dir() else [path]
        for found in (*parts, *beside, journal, *path.parent.glob(f"{journal.name}-*")):
            found.unlink(missing_ok=True)
    elif path.exists() and not (keeps_journal and journal.exists()) and not (path.is_dir() and not any(path.iterdir())):
        raise BulkInputError(f"{path} exists, and no journal of a run that has written it. --overwrite removes it.")


def files_of_run(path: Path) -> frozenset[Path]:
    """Return what an earlier run has written for this output, resolved; nothing without its journal. Blocking."""
    journal = journal_path(path)
    if not journal.exists():
        return frozenset()
    parts = [found for found in path.iterdir() if _is_part(found)] if path.is_dir() else [path]
    journals = [journal.with_name(f"{journal.name}{end}") for end in ("", "-wal", "-shm", "-journal")]
    return frozenset(found.resolve() for found in (*parts, errors_path(path), *journals))


def _check_inputs(inputs: Iterable[Path], written: Iterable[Path]) -> None:
    places = {path.resolve(): path for path in written}
    for file in inputs:
        resolved = file.resolve()
        for place in (resolved, *resolved.parents):
            if place in places:
                where = "is the input" if place == resolved else f"has {file} in it, which is an input"
                raise BulkInputError(f"{places[place]} {where}: it would be overwritten. Name another output.")


def _parts(folder: Path) -> list[Path]:
    """Return the parts of a folder. Raises ``BulkInputError`` if there are other files in it."""
    found = sorted(folder.iterdir())
    parts = [path for path in found if _is_part(path)]
    others = [path.name for path in found if not _is_part(path) and path.name[0] not in "._"]
    if others:
        raise BulkInputError(
            f"{folder} has other files in it ({others[0]}), which --overwrite does not remove: name a new folder."
        )
    return parts


def _is_part(path: Path) -> bool:
    return PART.fullmatch(path.name) is not None and not path.is_dir()


def _check_unused(journal: Path) -> None:
    if not journal.exists():
        return
    try:
        with closing(sqlite3.connect(journal, timeout=0, isolation_level=None)) as connection:
            connection.executescript(SETTINGS)
            connection.execute("BEGIN IMMEDIATE")
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StorageInUseError(f"Another run is writing this output: {journal} is in use.") from error
        # What is no journal is removed like one.

"""What an earlier run, or something else, has left where a run is to write."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from trio_pool_serve.bulk.bulk_options import journal_path
from trio_pool_serve.errors import BulkInputError, StorageInUseError
from trio_pool_serve.storage.database import SETTINGS


def check_output(path: Path, *, overwrite: bool, keeps_journal: bool = True, beside: Iterable[Path] = ()) -> None:
    """Remove an output that is to be overwritten, and the files ``beside`` it; refuse one that no journal knows.

    Raises ``BulkInputError``, and ``StorageInUseError`` rather than removing what another run is writing. Blocking.
    """
    if not path.parent.is_dir():
        raise BulkInputError(f"The folder {path.parent} does not exist.")
    journal = journal_path(path)
    if overwrite:
        _check_unused(journal)
        for found in (path, *beside, journal, *path.parent.glob(f"{journal.name}-*")):
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink(missing_ok=True)
    elif path.exists() and not (keeps_journal and journal.exists()) and not (path.is_dir() and not any(path.iterdir())):
        raise BulkInputError(f"{path} exists, and no journal of a run that has written it. --overwrite removes it.")


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

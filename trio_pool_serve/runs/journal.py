"""The journal of a run: what it computes from what, and how much of that is committed."""

import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from attrs import define, frozen

from trio_pool_serve.errors import BulkInputError, StorageError, StorageInUseError
from trio_pool_serve.runs.tables.input_table import Fingerprint
from trio_pool_serve.storage.database import IN_MEMORY, Database, open_database

ON_ERROR = "--on-error"

SCHEMA = "CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"


@frozen(kw_only=True)
class Identity:
    """What the bytes of an output depend on: a run goes on only where all of it is the same."""

    input: Fingerprint
    arguments: dict[str, str | int | bool | None]
    model: dict[str, str]

    def changes(self, now: "Identity", *, nothing_failed: bool = False) -> str:
        """Return what differs, as sentences; "" for nothing.

        If nothing has failed so far, what is to be done with rows that fail may differ.
        """
        sentences = [self.input.changes(now.input)]
        for before, after in ((self.arguments, now.arguments), (self.model, now.model)):
            sentences += [
                f"{name} is {after.get(name)!r}, where it was {before.get(name)!r}."
                for name in {**before, **after}
                if before.get(name) != after.get(name) and not (nothing_failed and name == ON_ERROR)
            ]
        return " ".join(filter(None, sentences))


@frozen(kw_only=True)
class Progress:
    """How far a run has come: ``next_row`` is the number of the input's first row that is not committed.

    ``output`` is the position in the output, ``error_bytes`` the length of the file of errors.
    """

    next_row: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    output: bytes | None = None
    error_bytes: int = 0
    is_finished: bool = False


@define(eq=False)
class Journal:
    """Commits the progress of one run. Another process cannot open it meanwhile."""

    database: Database
    identity: Identity
    progress: Progress

    async def commit(self, progress: Progress) -> None:
        """Commit progress, whose files are on the disk. Raises ``StorageError``. Cancellation: it may be committed."""
        encoded = msgspec.json.encode(progress)
        await self.database.run(lambda connection: _put(connection, {"progress": encoded}))
        self.progress = progress


@asynccontextmanager
async def open_journal(path: Path | None, identity: Identity) -> AsyncIterator[Journal]:
    """Open the journal of a run, or begin one; without a path nothing is kept.

    Raises ``BulkInputError`` if the run that it is of is another one, ``StorageInUseError`` if that is running, and
    ``StorageError``. Cancellation: at once.
    """
    try:
        async with open_database(path or IN_MEMORY, SCHEMA) as database:
            kept = await database.run(_read)
            journal = Journal(database, identity, msgspec.json.decode(kept.get("progress", b"{}"), type=Progress))
            if "identity" in kept:
                _check(database.path, kept["identity"], identity, journal.progress)
            await database.run(lambda connection: _put(connection, {"identity": msgspec.json.encode(identity)}))
            yield journal
    except StorageInUseError:
        raise StorageInUseError(f"Another run is writing this output: {path} is in use.") from None


def _check(path: Path, kept: bytes, identity: Identity, progress: Progress) -> None:
    try:
        before = msgspec.json.decode(kept, type=Identity)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    changes = before.changes(identity, nothing_failed=not progress.failed)
    if changes:
        raise BulkInputError(
            f"The output was begun by another run, and cannot be gone on with: {changes} "
            "Use another output, or --overwrite to begin again."
        )


def _read(connection: sqlite3.Connection) -> dict[str, bytes]:
    return {row["name"]: row["value"] for row in connection.execute("SELECT name, value FROM run")}


def _put(connection: sqlite3.Connection, values: Mapping[str, bytes]) -> None:
    connection.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", list(values.items()))

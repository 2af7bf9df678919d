"""The journal of a run: its inputs and settings, and its committed position."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from attrs import define, evolve, frozen

from trio_pool_serve.errors import BulkInputError, StorageError, StorageInUseError, require
from trio_pool_serve.runs.run import Position
from trio_pool_serve.runs.tables.input_table import Fingerprint
from trio_pool_serve.storage.database import IN_MEMORY, Database, open_database

ON_ERROR = "--on-error"

SCHEMA = "CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"


@frozen(kw_only=True)
class Identity:
    """The properties on which the bytes of an output depend: a run is resumed only if all of them are the same."""

    input: Fingerprint
    arguments: dict[str, str | int | bool | None]
    model: dict[str, str]

    def changes(self, now: "Identity", *, nothing_failed: bool = False) -> str:
        """Return the differences as sentences, or "".

        If nothing has failed so far, ``--on-error`` may differ.
        """
        sentences = [self.input.changes(now.input)]
        for before, after in ((self.arguments, now.arguments), (self.model, now.model)):
            sentences += [
                f"{name} is {after.get(name)!r}, but was {before.get(name)!r}."
                for name in {**before, **after}
                if before.get(name) != after.get(name) and not (nothing_failed and name == ON_ERROR)
            ]
        return " ".join(filter(None, sentences))


@define(eq=False)
class Journal:
    """Commits the position of one run. Another process cannot open it meanwhile."""

    database: Database
    identity: Identity
    position: Position

    @property
    def is_kept(self) -> bool:
        """Whether the run can be resumed: otherwise nothing is on disk."""
        return self.database.path != IN_MEMORY

    async def commit(self, position: Position) -> None:
        """Commit a position, before which all files are durable. Raises ``StorageError``.

        Cancellation: it may have been committed.
        """
        await self.database.run(lambda connection: _put(connection, "position", position))
        self.position = position


@asynccontextmanager
async def open_journal(path: Path | None, identity: Identity) -> AsyncIterator[Journal]:
    """Open the journal of a run, or begin one; without a path nothing is kept.

    The input of an earlier run with the same content keeps its modification times. Raises ``BulkInputError`` if the
    journal is of another run, ``StorageInUseError`` if another process has it open, and ``StorageError``. Cancellation:
    at once.
    """
    try:
        async with open_database(path or IN_MEMORY, SCHEMA) as database:
            kept = dict(await database.run(lambda connection: list(connection.execute("SELECT name, value FROM run"))))
            require(
                "progress" not in kept,
                f"{database.path} was written by an earlier version. Finish the run with that version, or use "
                "--overwrite to start again.",
                BulkInputError,
            )
            try:
                position = msgspec.json.decode(kept.get("position", b"{}"), type=Position)
                before = msgspec.json.decode(kept["identity"], type=Identity) if "identity" in kept else identity
            except msgspec.MsgspecError as error:
                raise StorageError(f"{database.path} cannot be read: {error}") from error
            if changes := before.changes(identity, nothing_failed=not position.failed):
                raise BulkInputError(
                    f"The output was written by another run, which cannot be resumed: {changes} Name another output, "
                    "or use --overwrite to start again."
                )
            identity = evolve(identity, input=before.input)
            await database.run(lambda connection: _put(connection, "identity", identity))
            yield Journal(database, identity, position)
    except StorageInUseError:
        raise StorageInUseError(f"Another run is writing this output: {path} is in use.") from None


def _put(connection: sqlite3.Connection, name: str, value: Position | Identity) -> None:
    connection.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (name, msgspec.json.encode(value)))

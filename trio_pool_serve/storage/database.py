"""A SQLite database that one process uses, on a thread of its own."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import trio
from attrs import define, field

from trio_pool_serve.errors import StorageError, StorageFullError, StorageInUseError, StorageLostError, require
from trio_pool_serve.threads.dedicated_threads import DedicatedThreads

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0

SETTINGS = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA foreign_keys = ON;
"""
"""EXCLUSIVE: the first transaction locks the database until the process ends, however it ends. FULL: a committed
transaction is on the disk."""


@define(eq=False)
class Database:
    """Runs transactions on one connection, one after the other, in the thread that has opened it.

    A committed transaction survives a crash of the process or the machine. No other process can use the database at
    the same time. ``replaced`` is set once a transaction has raised ``StorageLostError``.
    """

    path: Path
    replaced: trio.Event = field(init=False, factory=trio.Event)
    _files: list[tuple[int, int]] = field(init=False, factory=list)
    """Device and inode of the files that were opened."""
    _connection: sqlite3.Connection | None = field(default=None, init=False)
    _thread: DedicatedThreads = field(init=False, factory=lambda: DedicatedThreads("database"))
    _turn: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def run(self, transaction: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``transaction(connection)``, once it is committed; roll back if it raises.

        Raises ``StorageError`` for SQLite's errors about the disk, and ``StorageLostError`` if it is no longer at its
        path: then open it again. Cancellation: at once; a transaction that has begun is finished and committed.
        """
        try:
            return await self._in_thread(lambda: self._transact(transaction))
        except StorageLostError:
            self.replaced.set()
            raise

    async def _in_thread(self, blocking: Callable[[], T]) -> T:
        try:
            return await self._thread.run(blocking, limiter=self._turn)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StorageInUseError(f"{self.path} is in use by another process.") from error
            kind = StorageFullError if error.sqlite_errorcode == sqlite3.SQLITE_FULL else StorageError
            raise kind(f"{self.path}: {error}.") from error

    def _transact(self, transaction: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            raise StorageError(f"{self.path} has been closed.")
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            result = transaction(connection)
            require(
                self._files_at_path() == self._files,
                f"{self.path} was removed or replaced while it was open.",
                StorageLostError,
            )
            return result

    def _open(self, schema: str) -> None:
        self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript(SETTINGS)
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")  # takes the lock
        self._connection.executescript(schema)
        self._files = self._files_at_path()

    def _files_at_path(self) -> list[tuple[int, int]]:
        """Return device and inode of the database and its write-ahead log; an empty list if one is missing."""
        paths = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        with suppress(OSError):
            return [(status.st_dev, status.st_ino) for status in map(Path.stat, paths)]
        return []

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


IN_MEMORY = Path(":memory:")
"""SQLite's name for a database without a file."""


@asynccontextmanager
async def open_database(path: Path, schema: str) -> AsyncIterator[Database]:
    """Open a database for as long as the block lasts; create it if it does not exist.

    ``schema`` is SQL that changes nothing if it is run again. Raises ``StorageInUseError`` if another process has
    opened the database, and ``StorageError`` if it cannot be opened. Cancellation: at once, after closing it, which
    takes at most ``CLOSE_TIMEOUT_S``.
    """
    database = Database(path)
    try:
        await database._in_thread(lambda: database._open(schema))  # noqa: SLF001  (the other half of the class)
        yield database
    except sqlite3.DatabaseError as error:
        raise StorageError(f"{path} is damaged, or is not a database of this program: {error}.") from error
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_TIMEOUT_S):
            await database._in_thread(database._close)  # noqa: SLF001
        database._thread.close()  # noqa: SLF001

"""Files and batches in the database. Each method is one transaction; cancellation of all: as ``Database.run``."""

import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from attrs import define, evolve, frozen

from trio_pool_serve.errors import ConflictError, NotFoundError, QuotaExceededError, require, require_request
from trio_pool_serve.runs.batch_api.stored_records import (
    FINAL,
    TRANSITIONS,
    BatchStatus,
    StoredBatch,
    StoredFile,
    time_of,
)
from trio_pool_serve.runs.run import Position
from trio_pool_serve.storage.database import Database

T = TypeVar("T", StoredFile, StoredBatch)
Returned = TypeVar("Returned")
Given = ParamSpec("Given")

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    is_final INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    ended_at INTEGER,
    idempotency_key TEXT,
    request BLOB,
    record BLOB NOT NULL,
    UNIQUE (owner, idempotency_key)
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (number) WHERE NOT is_final;
CREATE INDEX IF NOT EXISTS inputs ON batches (input_file_id) WHERE NOT is_final;
"""
"""The columns beside ``record`` (JSON) are for queries."""


@frozen
class Page:
    """The requested page of a list: at most ``limit`` entries after the id ``after``, the newest or oldest first."""

    limit: int
    after: str | None = None
    newest_first: bool = True


TRANSACTION_TIMEOUT_S = 60.0
"""Time limit for storing or cancelling a batch, including earlier transactions."""

MAX_UNFINISHED = 100
"""The limit of one owner's unfinished batches: quotas are computed from all of their records."""

TABLES: Mapping[type, tuple[str, str]] = {
    StoredFile: ("files", "No such File object: {}"),
    StoredBatch: ("batches", "No batch found with id '{}'."),
}
"""The table of each record, and OpenAI's message for an id that is not in it."""


def transaction(
    method: Callable[Concatenate["BatchStore", sqlite3.Connection, Given], Returned],
) -> Callable[Concatenate["BatchStore", Given], Coroutine[Any, Any, Returned]]:
    """Make one transaction of a method: it is called in the database's thread, with the connection."""

    @wraps(method)
    async def run(self: "BatchStore", /, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        return await self.database.run(lambda connection: method(self, connection, *args, **kwargs))

    return run


@define(eq=False)
class BatchStore:
    """The files and batches of all owners. Each owner finds only its own; others raise ``NotFoundError``.

    ``max_stored_bytes`` limits the bytes of all files of one owner; 0 is no limit.
    """

    database: Database
    max_stored_bytes: int = 0
    clock: Callable[[], float] = time.time

    # -- files ------------------------------------------------------------------------------------------------------

    @transaction
    def add_file(self, connection: sqlite3.Connection, file: StoredFile) -> None:
        """Store a file, whose bytes are on the disk. Raises ``QuotaExceededError``."""
        self._check_bytes(connection, file.owner, file.bytes)
        _insert_file(connection, file)

    @transaction
    def check_room(self, connection: sqlite3.Connection, owner: str, nbytes: int) -> None:
        """Raise ``QuotaExceededError`` if an owner may not store another ``nbytes``."""
        self._check_bytes(connection, owner, nbytes)

    @transaction
    def file(self, connection: sqlite3.Connection, owner: str, file_id: str) -> StoredFile:
        """Return a file. Raises ``NotFoundError``."""
        return _find(connection, StoredFile, owner, file_id)

    @transaction
    def files(
        self, connection: sqlite3.Connection, owner: str, page: Page, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of files, and whether more follow. Raises ``NotFoundError`` for its ``after``."""
        return _page(
            connection, StoredFile, page, {"owner": owner, "purpose": purpose} if purpose else {"owner": owner}
        )

    @transaction
    def remove_file(self, connection: sqlite3.Connection, owner: str, file_id: str) -> None:
        """Remove a file from the database; then its bytes are not needed.

        Raises ``NotFoundError``, and ``ConflictError`` while a batch reads it.
        """
        _find(connection, StoredFile, owner, file_id)
        used_by = connection.execute(
            "SELECT id FROM batches WHERE input_file_id = ? AND NOT is_final", (file_id,)
        ).fetchone()
        if used_by is not None:
            raise ConflictError(f"The file {file_id} is the input of {used_by['id']}, which has not ended yet.")
        connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # -- batches ----------------------------------------------------------------------------------------------------

    @transaction
    def add_batch(
        self,
        connection: sqlite3.Connection,
        batch: StoredBatch,
        *,
        idempotency_key: str | None = None,
        request: bytes = b"",
    ) -> StoredBatch:
        """Store a new batch, and return it; or the one that was created by the same request with the same key.

        ``digest`` and ``input_created_at`` are taken from the input file. Raises ``NotFoundError`` if there is no such
        file, ``InvalidRequestError`` if it is not for batches, ``QuotaExceededError``, and ``ConflictError`` if another
        request had that key.
        """
        if idempotency_key is not None and (known := _of_key(connection, batch.owner, idempotency_key, request)):
            return known
        source = _find(connection, StoredFile, batch.owner, batch.input_file_id)
        require_request(
            source.purpose == "batch",
            f"The file {source.id} has the purpose {source.purpose}, not batch.",
            param="input_file_id",
        )
        self._check_bytes(connection, batch.owner, 0)
        (unfinished,) = connection.execute(
            "SELECT COUNT(*) FROM batches WHERE owner = ? AND NOT is_final", (batch.owner,)
        ).fetchone()
        require(
            unfinished < MAX_UNFINISHED,
            f"The limit of {MAX_UNFINISHED} unfinished batches is reached. Wait until one ends, or cancel one.",
            QuotaExceededError,
        )
        times = {"created_at": int(self.clock()), **batch.times}
        added = evolve(batch, digest=source.digest, input_created_at=source.created_at, times=times)
        connection.execute(
            "INSERT INTO batches (id, owner, is_final, input_file_id, idempotency_key, request, record) "
            "VALUES (?, ?, 0, ?, ?, ?, ?)",
            (added.id, added.owner, added.input_file_id, idempotency_key, request, msgspec.json.encode(added)),
        )
        return added

    @transaction
    def batch(self, connection: sqlite3.Connection, owner: str | None, batch_id: str) -> StoredBatch:
        """Return a batch of an owner, or of any. Raises ``NotFoundError``."""
        return _find(connection, StoredBatch, owner, batch_id)

    @transaction
    def batches(self, connection: sqlite3.Connection, owner: str, page: Page) -> tuple[list[StoredBatch], bool]:
        """Return a page of batches, and whether more follow. Raises ``NotFoundError`` for ``after``."""
        return _page(connection, StoredBatch, page, {"owner": owner})

    @transaction
    def unfinished(self, connection: sqlite3.Connection) -> list[StoredBatch]:
        """Return all batches that have not ended, of all owners, in the order of their creation."""
        return _unfinished(connection)

    @transaction
    def advance(
        self,
        connection: sqlite3.Connection,
        /,
        batch_id: str,
        to: BatchStatus,
        results: Sequence[StoredFile] = (),
        **changes: Any,
    ) -> StoredBatch:
        """Bring a batch into a state, with other changes to it, and return it; ``results`` become files.

        Raises ``ConflictError`` if that state does not follow the one that it is in.
        """
        batch = _find(connection, StoredBatch, None, batch_id)
        require(
            to in TRANSITIONS[batch.status],
            f"The batch {batch_id} is {batch.status}, and cannot become {to}.",
            ConflictError,
        )
        for file in results:
            _insert_file(connection, file)
        times = {**batch.times, time_of(to): int(self.clock())}
        return _update_batch(connection, evolve(batch, **{**changes, "status": to, "times": times}))

    async def cancel(self, owner: str, batch_id: str) -> StoredBatch:
        """Bring a batch into the state ``cancelling``, and return it; one that is, or is cancelled, stays as it is.

        Raises ``NotFoundError``, and ``ConflictError`` for a batch that has ended otherwise, or is about to.
        """
        batch = await self.batch(owner, batch_id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        return await self.advance(batch_id, "cancelling")

    @transaction
    def commit(self, connection: sqlite3.Connection, batch_id: str, position: Position) -> None:
        """Store the position of a batch. Raises ``QuotaExceededError`` if its results take more than the owner may."""
        batch = _find(connection, StoredBatch, None, batch_id)
        _update_batch(connection, evolve(batch, position=position))
        self._check_bytes(connection, batch.owner, 0)

    # -- retention --------------------------------------------------------------------------------------------------

    @transaction
    def remove_expired(self, connection: sqlite3.Connection, retention_s: float) -> None:
        """Remove files past their time and, if ``retention_s`` is not 0, files and ended batches of before that.

        The input of a batch that has not ended stays.
        """
        now = int(self.clock())
        before = now - retention_s if retention_s else 0.0
        connection.execute("DELETE FROM batches WHERE is_final AND ended_at < ?", (before,))
        connection.execute(
            "DELETE FROM files WHERE (created_at < ? OR expires_at <= ?) "
            "AND id NOT IN (SELECT input_file_id FROM batches WHERE NOT is_final)",
            (before, now),
        )

    @transaction
    def known_ids(self, connection: sqlite3.Connection) -> set[str]:
        """Return the ids of all files: complete ones, and the results of batches that have not ended."""
        complete = {row["id"] for row in connection.execute("SELECT id FROM files")}
        return complete | {file for batch in _unfinished(connection) for file in (batch.output_id, batch.error_id)}

    def _check_bytes(self, connection: sqlite3.Connection, owner: str, nbytes: int) -> None:
        if not self.max_stored_bytes:
            return
        (stored,) = connection.execute("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?", (owner,)).fetchone()
        positions = [batch.position for batch in _unfinished(connection, "AND owner = ?", owner)]
        stored += sum(position.output_bytes + position.error_bytes for position in positions)
        require(
            stored + nbytes <= self.max_stored_bytes,
            f"All files together may have {self.max_stored_bytes} bytes; there are {stored} already. Delete some.",
            QuotaExceededError,
        )


def _insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    connection.execute(
        "INSERT INTO files (id, owner, purpose, bytes, created_at, expires_at, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(file.id, file.owner, file.purpose, file.bytes, file.created_at, file.expires_at),
            msgspec.json.encode(file),
        ),
    )


def _update_batch(connection: sqlite3.Connection, batch: StoredBatch) -> StoredBatch:
    ended_at = batch.times[time_of(batch.status)] if batch.status in FINAL else None
    connection.execute(
        "UPDATE batches SET is_final = ?, ended_at = ?, record = ? WHERE id = ?",
        (ended_at is not None, ended_at, msgspec.json.encode(batch), batch.id),
    )
    return batch


def _unfinished(connection: sqlite3.Connection, where: str = "", *values: object) -> list[StoredBatch]:
    """Return the batches that have not ended, in the order of their creation."""
    query = f"SELECT record FROM batches WHERE NOT is_final {where} ORDER BY number"  # noqa: S608  (of ours)
    return [_decode(row, StoredBatch) for row in connection.execute(query, values)]


def _find(connection: sqlite3.Connection, kind: type[T], owner: str | None, record_id: str) -> T:
    """Return a record of an owner, or of any. Raises ``NotFoundError``."""
    table, message = TABLES[kind]
    query = f"SELECT record, owner FROM {table} WHERE id = ?"  # noqa: S608  (a name of ours)
    row = connection.execute(query, (record_id,)).fetchone()
    if row is None or owner not in (None, row["owner"]):
        raise NotFoundError(message.format(record_id))
    return _decode(row, kind)


def _of_key(connection: sqlite3.Connection, owner: str, idempotency_key: str, request: bytes) -> StoredBatch | None:
    row = connection.execute(
        "SELECT record, request FROM batches WHERE owner = ? AND idempotency_key = ?", (owner, idempotency_key)
    ).fetchone()
    if row is None:
        return None
    require(row["request"] == request, "Another request has been sent with this Idempotency-Key.", ConflictError)
    return _decode(row, StoredBatch)


def _page(
    connection: sqlite3.Connection, kind: type[T], page: Page, columns: Mapping[str, str]
) -> tuple[list[T], bool]:
    """Return a page of the records with these values of columns, and whether more follow."""
    table, _ = TABLES[kind]
    conditions = " AND ".join(f"{column} = ?" for column in columns)
    bound: list[object] = list(columns.values())
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND owner = ?",  # noqa: S608  (names of ours)
            (page.after, columns["owner"]),
        ).fetchone()
        if row is None:
            raise NotFoundError(f"There is no {page.after} to list what is behind it.")
        conditions += f" AND number {'<' if page.newest_first else '>'} ?"
        bound.append(row["number"])
    order = "DESC" if page.newest_first else "ASC"
    rows = connection.execute(
        f"SELECT record FROM {table} WHERE {conditions} ORDER BY number {order} LIMIT ?",  # noqa: S608  (likewise)
        (*bound, page.limit + 1),
    ).fetchall()
    return [_decode(row, kind) for row in rows[: page.limit]], len(rows) > page.limit


def _decode(row: Mapping[str, Any], kind: type[T]) -> T:
    return msgspec.json.decode(row["record"], type=kind)

"""The files and batches of a data folder, in the one process that has opened it."""

import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import trio
from attrs import define, field

from trio_pool_serve.runs.batch_api.batch_runner import BatchRunner
from trio_pool_serve.runs.batch_api.batch_store import BatchStore
from trio_pool_serve.runs.batch_api.data_folder import DataFolder
from trio_pool_serve.runs.batch_api.stored_records import StoredBatch, StoredFile, new_id
from trio_pool_serve.storage.durable_files import AppendedFile, publish
from trio_pool_serve.threads.offload import Offload

TRANSACTION_TIMEOUT_S = 60.0
"""For storing a batch, behind the transactions before it."""

SWEEP_S = 3600.0

FILE_PREFIX = "file-"


@define(eq=False)
class Upload:
    """A file that is being received. Its methods block."""

    id: str
    file: AppendedFile
    digest: Any = field(factory=sha256)

    def append(self, parts: Sequence[bytes]) -> None:
        """Write at the end. Raises ``StorageError``."""
        for part in parts:
            self.file.append(part)
            self.digest.update(part)


@define(eq=False)
class OpenBatches:
    """The store, the runner of its batches, and the files beside it."""

    folder: DataFolder
    store: BatchStore
    runner: BatchRunner
    offload: Offload
    retention_s: float
    uploads: trio.CapacityLimiter = field(
        init=False, factory=lambda: trio.CapacityLimiter(max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
    )
    """Limits uploads at a time: each has a file open, and the server needs others."""
    _incomplete: dict[str, int] = field(init=False, factory=dict)
    """Bytes being received, by owner."""
    _publishing: set[str] = field(init=False, factory=set)
    """Ids of files that are on the disk, but not in the database yet."""

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[Upload]:
        """Open an upload for the block; at its end the upload is removed unless ``complete`` has been called.

        Raises ``StorageError``. Cancellation: at once, but for what a thread has begun.
        """
        file_id = new_id(FILE_PREFIX)
        try:
            with closing(await self.offload.run("files", partial(self.folder.open_upload, file_id))) as file:
                yield Upload(file_id, file)
        finally:
            with suppress(OSError):
                self.folder.upload(file_id).unlink(missing_ok=True)

    @asynccontextmanager
    async def reserving(self, owner: str, announced: int = 0) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """Return a function that checks whether an owner may send N bytes beyond the announced ones.

        Both raise ``QuotaExceededError``, and ``StorageError`` if the database cannot be used. Cancellation: at once.
        """
        mine = 0

        async def reserve(nbytes: int) -> None:
            nonlocal mine
            mine += nbytes
            self._incomplete[owner] = self._incomplete.get(owner, 0) + nbytes
            await self.store.check_room(owner, self._incomplete[owner])

        try:
            await reserve(announced)
            yield reserve
        finally:
            left = self._incomplete.pop(owner, 0) - mine
            if left > 0:
                self._incomplete[owner] = left

    async def complete(self, upload: Upload, owner: str, *, filename: str, expire_s: int | None) -> StoredFile:
        """Make an upload a durable file for batches, and return it.

        Raises ``StorageError`` and ``QuotaExceededError``. Cancellation: before the file is there, or after.
        """
        now = int(self.store.clock())
        file = StoredFile(
            id=upload.id,
            owner=owner,
            purpose="batch",
            filename=filename,
            bytes=upload.file.length,
            created_at=now,
            expires_at=None if expire_s is None else now + expire_s,
            digest=upload.digest.hexdigest(),
        )
        self._publishing.add(file.id)
        try:
            await self.offload.run("files", partial(publish, self.folder.upload(file.id), self.folder.file(file.id)))
            try:
                await self.store.add_file(file)
            except Exception:
                await self.offload.run("files", partial(self.folder.remove_files, [file.id]))
                raise
        finally:
            self._publishing.discard(file.id)
        return file

    async def remove_file(self, owner: str, file_id: str) -> None:
        """Remove a file. Raises as ``BatchStore.remove_file``. Cancellation: its bytes may be left to a sweep."""
        await self.store.remove_file(owner, file_id)
        await self.offload.run("files", partial(self.folder.remove_files, [file_id]))

    async def add_batch(self, batch: StoredBatch, *, idempotency_key: str | None, request: bytes) -> StoredBatch:
        """Store a batch and run it; return it, or the batch of an earlier request with the same key.

        Raises as ``BatchStore.add_batch``. Cancellation: it may have been stored; then it is run.
        """
        # Not cancelled: a batch that is stored is to be run.
        with trio.fail_after(TRANSACTION_TIMEOUT_S, shield=True):
            added = await self.store.add_batch(batch, idempotency_key=idempotency_key, request=request)
            if added.id == batch.id:
                self.runner.start(added)
        return added

    async def sweep(self) -> None:
        """Remove expired files and batches, and bytes that belong to nothing. Raises ``StorageError``.

        Cancellation: at once, but for what a thread has begun.
        """
        await self.store.remove_expired(self.retention_s)
        # In this order: files are listed before ids are read, and a batch is stored before its files exist.
        there = await self.offload.run("files", self.folder.file_ids)
        publishing = set(self._publishing)
        known = await self.store.known_ids()
        await self.offload.run("files", partial(self.folder.remove_files, there - publishing - known))

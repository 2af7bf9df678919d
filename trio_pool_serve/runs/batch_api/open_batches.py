"""The files and batches of a data folder, in the one process that has opened it."""

import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import trio
from attrs import define, field

from trio_pool_serve.runs.batch_api.batch_runner import BatchRunner
from trio_pool_serve.runs.batch_api.batch_store import TRANSACTION_TIMEOUT_S, BatchStore
from trio_pool_serve.runs.batch_api.data_folder import DataFolder
from trio_pool_serve.runs.batch_api.stored_records import StoredBatch, StoredFile, new_id
from trio_pool_serve.storage.durable_files import AppendedFile, publish
from trio_pool_serve.threads.offload import Offload

SWEEP_S = 3600.0

FILE_PREFIX = "file-"


@define(eq=False)
class Upload:
    """A file that is being received, of which its owner may send ``reserved`` bytes."""

    owner: str
    reserved: int = field(default=0, init=False)
    id: str = field(init=False, factory=lambda: new_id(FILE_PREFIX))
    file: AppendedFile = field(init=False)
    digest: Any = field(init=False, factory=sha256)

    def append(self, parts: Sequence[bytes]) -> None:
        """Write at the end. Raises ``StorageError``. Blocks."""
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
    _uploads: set[Upload] = field(init=False, factory=set)
    """Uploads that have not ended; the bytes of one may be on the disk, but not in the database yet."""
    _counting: trio.Lock = field(init=False, factory=trio.Lock)
    """Held while an upload becomes a file, and while files and uploads are counted: each counts once."""
    _turns: trio.CapacityLimiter = field(
        init=False, factory=lambda: trio.CapacityLimiter(max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
    )
    """Limits uploads at a time: each has a file open, and the server needs others."""

    @asynccontextmanager
    async def receiving(self, owner: str, announced: int = 0) -> AsyncIterator[Upload]:
        """Open an upload for the block; at its end the upload is removed unless ``complete`` has been called.

        Raises ``StorageError``, and as ``reserve``. Cancellation: at once, or once a running thread has finished.
        """
        upload = Upload(owner)
        self._uploads.add(upload)
        try:
            await self.reserve(upload, announced)
            async with self._turns:
                with closing(
                    await self.offload.run("files", partial(self.folder.open_upload, upload.id))
                ) as upload.file:
                    yield upload
        finally:
            with suppress(OSError):
                self.folder.upload(upload.id).unlink(missing_ok=True)
            self._uploads.remove(upload)

    async def reserve(self, upload: Upload, nbytes: int) -> None:
        """Let the owner send another ``nbytes``.

        Raises ``QuotaExceededError``, and ``StorageError`` if the database cannot be used. Cancellation: at once.
        """
        async with self._counting:
            upload.reserved += nbytes
            reserved = sum(each.reserved for each in self._uploads if each.owner == upload.owner)
            await self.store.check_room(upload.owner, reserved)

    async def complete(self, upload: Upload, *, filename: str, expire_s: int | None) -> StoredFile:
        """Make an upload a durable file for batches, and return it.

        Raises ``StorageError`` and ``QuotaExceededError``. Cancellation: before the file is there, or after.
        """
        now = int(self.store.clock())
        file = StoredFile(
            id=upload.id,
            owner=upload.owner,
            purpose="batch",
            filename=filename,
            bytes=upload.file.length,
            created_at=now,
            expires_at=None if expire_s is None else now + expire_s,
            digest=upload.digest.hexdigest(),
        )
        await self.offload.run("files", partial(publish, self.folder.upload(file.id), self.folder.file(file.id)))
        try:
            async with self._counting:
                await self.store.add_file(file)
                upload.reserved = 0
        except Exception:
            await self.offload.run("files", partial(self.folder.remove_files, [file.id]))
            raise
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

        Cancellation: at once, or once a running thread has finished.
        """
        await self.store.remove_expired(self.retention_s)
        # In this order: files are listed before ids are read, and a batch is stored before its files exist.
        there = await self.offload.run("files", self.folder.file_ids)
        uploaded = {upload.id for upload in self._uploads}
        known = await self.store.known_ids()
        await self.offload.run("files", partial(self.folder.remove_files, there - uploaded - known))

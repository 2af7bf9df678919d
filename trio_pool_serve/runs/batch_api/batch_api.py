"""The Files and Batch API: one process of the server owns the data folder, the others forward requests to it."""

import logging
import multiprocessing
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import Factory, define, field

from trio_pool_serve.config import Config
from trio_pool_serve.errors import (
    EngineLoadingError,
    ModelLoadError,
    StorageError,
    StorageInUseError,
    require,
    unwrap_exception_groups,
)
from trio_pool_serve.processes.socket_folder import serve_at
from trio_pool_serve.runs.batch_api.batch_runner import RETRY_PAUSE_S, BatchRunner, BatchStatistics, LineRoutes
from trio_pool_serve.runs.batch_api.batch_store import SCHEMA, BatchStore
from trio_pool_serve.runs.batch_api.data_folder import SOCKET_NAME, DataFolder
from trio_pool_serve.runs.batch_api.open_batches import SWEEP_S, OpenBatches
from trio_pool_serve.storage.database import IN_MEMORY, Database, open_database
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

LOCATE_S = 5.0
"""Time limit of a request that waits for an owner of the folder."""

RETRY_S = 1.0
"""Pause before the next attempt to open a folder that another process owns."""

SHORT_RETRY_S = 0.05
"""The least pause between two attempts."""

Serve: TypeAlias = Callable[[trio.SocketStream], Awaitable[None]]
"""Serves HTTP on a connection of another process of the server."""


@define(eq=False)
class BatchApi:
    """Opens the data folder in one process of the server, the owner, and gives the others the owner's socket.

    The owner is the process that has opened the database. If it ends, another process becomes the owner and resumes
    the batches. Nothing is created before the first upload. ``socket_folder`` is shared by the processes of the server.
    Without one, as under hypercorn, processes with the same parent belong together and meet in the data folder.
    """

    config: Config
    offload: Offload
    socket_folder: Path | None = None
    _opened: OpenBatches | None = field(default=None, init=False)
    _routes: LineRoutes = field(init=False)
    _serve: Serve = field(init=False)
    """Set by ``connect``, like ``_routes``: nothing is opened before."""
    _connected: trio.Event = field(init=False, factory=trio.Event)
    _is_running: bool = field(default=False, init=False)
    _wanted: trio.Event = field(init=False, factory=trio.Event)
    """Set once the folder exists or is needed."""
    _hurry: trio.Event = field(init=False, factory=trio.Event)
    """Set by a request that waits for the next attempt to open the folder, and replaced after each attempt."""
    _attempted: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    """Woken after each attempt to open the folder."""
    _failure: StorageError | None = field(default=None, init=False)
    """The error of the last attempt."""
    folder: DataFolder = field(init=False, default=Factory(lambda self: DataFolder.of(self.config), takes_self=True))

    @property
    def socket(self) -> Path:
        """Where the owner listens for requests that other processes have received."""
        if self.socket_folder is not None:
            return self.socket_folder / SOCKET_NAME
        parent = multiprocessing.parent_process()
        return self.folder.path / f"{os.getpid() if parent is None else parent.pid}.{SOCKET_NAME}"

    def connect(self, routes: LineRoutes, serve: Serve) -> None:
        """Compute lines by ``routes`` and serve requests of other processes by ``serve`` from now on."""
        self._routes, self._serve = routes, serve
        self._connected.set()

    def statistics(self) -> BatchStatistics:
        """Return the batches that this process runs: none if another process owns the folder."""
        return BatchStatistics() if self._opened is None else self._opened.runner.statistics()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the folder once it exists or is needed, and run its batches, until cancelled.

        Errors are logged, and the folder is opened again. Cancellation: as soon as running threads have finished;
        batches resume from their last commit with the next ``run``.
        """
        self._is_running = self.config.batch.is_served
        task_status.started()
        if not self._is_running:
            return
        try:
            while True:
                if not self._wanted.is_set() and await self.offload.run("files", self.folder.exists):
                    self._wanted.set()
                await self._wanted.wait()
                await self._connected.wait()  # an owner has to answer the other processes
                await self._own_once()
                self._attempted.unpark_all()
                self._hurry = trio.Event()
                await trio.sleep(SHORT_RETRY_S)  # however many requests wait
                with trio.move_on_after(RETRY_S if isinstance(self._failure, StorageInUseError) else RETRY_PAUSE_S):
                    await self._hurry.wait()
        finally:
            self._is_running = False

    async def locate(self, *, create: bool) -> OpenBatches | Path | None:
        """Return the folder if this process owns it, or else the socket of its owner.

        Returns ``None`` if nothing has been stored yet, unless ``create``: then the folder is created. Raises
        ``StorageError``, ``StorageInUseError`` if another server owns the folder, and ``EngineLoadingError`` before
        ``run`` if no other process of the server owns it. Cancellation: at once.
        """
        deadline = trio.current_time() + LOCATE_S
        while self._opened is None:
            if await self._is_served():
                self._wanted.set()  # to take over when that process ends
                return self.socket
            require(self._is_running, "The server is starting.", EngineLoadingError)
            if not create and not await self.offload.run("files", self.folder.exists):
                return None
            await self._attempt(deadline)
        return self._opened

    @asynccontextmanager
    async def empty(self) -> AsyncIterator[OpenBatches]:
        """Return empty batches in memory, to answer requests before anything is stored. Cancellation: at once."""
        async with open_database(IN_MEMORY, SCHEMA) as database:
            yield self._batches_in(database)

    async def _attempt(self, deadline: float) -> None:
        """Wait for the next attempt to open the folder. Raises ``StorageError`` if that has failed."""
        self._wanted.set()
        self._hurry.set()
        with trio.move_on_at(deadline):
            await self._attempted.park()
        if self._opened is None and self._failure is not None and not isinstance(self._failure, StorageInUseError):
            raise self._failure
        if self._opened is None and trio.current_time() >= deadline:
            raise StorageInUseError(
                f"{self.folder.path} is in use by another server. Set another --data-dir for each server."
            )

    async def _is_served(self) -> bool:
        """Return whether a process listens at the socket."""
        try:
            stream = await trio.open_unix_socket(self.socket)
        except (OSError, ValueError, RuntimeError):
            return False
        await trio.aclose_forcefully(stream)
        return True

    async def _own_once(self) -> None:
        """Open the folder and run its batches until cancelled; return if that fails or the folder is removed."""
        before, self._failure = self._failure, None
        try:
            with unwrap_exception_groups(StorageError):
                if await self._is_served():  # its owner may have lost the folder, and makes it again
                    raise StorageInUseError("another process of this server serves them")  # noqa: TRY301
                await self.offload.run("files", self.folder.create)
                async with open_database(self.folder.database, SCHEMA) as database:
                    await self._own(database)
        except StorageError as error:
            self._failure = error
        except Exception:
            self._failure = StorageError("Files and batches are not served because of an internal error.")
            logger.exception("files and batches cannot be served")
        finally:
            self._opened = None
        if self._failure is not None and str(self._failure) != str(before):
            level = logging.INFO if isinstance(self._failure, StorageInUseError) else logging.WARNING
            logger.log(level, "this process does not serve files and batches: %s", self._failure)

    def _batches_in(self, database: Database) -> OpenBatches:
        batch = self.config.batch
        store = BatchStore(database, batch.max_stored_bytes)
        runner = BatchRunner(store, self.folder, self.offload, self.config.network.max_body_bytes, lambda: self._routes)
        return OpenBatches(self.folder, store, runner, self.offload, batch.file_retention_days * 24 * 3600.0)

    async def _own(self, database: Database) -> None:
        opened = self._batches_in(database)
        # The earlier owner has ended.
        await self.offload.run("files", partial(self.folder.remove_left, self.socket))
        async with trio.open_nursery() as nursery:
            await nursery.start(opened.runner.run)
            await nursery.start(self._listen)
            nursery.start_soon(_sweep, opened)
            self._opened = opened
            self._attempted.unpark_all()
            logger.info("files and batches are stored in %s", self.folder.path)
            await database.replaced.wait()
            self._opened = None
            nursery.cancel_scope.cancel(reason="the database has been removed or replaced")

    async def _listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve the requests that other processes of the server have received."""
        try:
            await serve_at(self.socket, partial(trio.serve_listeners, self._answer), task_status=task_status)
        except ModelLoadError as error:  # its path may be too long
            logger.warning("only this process serves files and batches: %s", error)
            task_status.started()

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await self._serve(stream)
            except Exception:
                logger.exception("a connection of another process failed")


async def _sweep(opened: OpenBatches) -> None:
    while True:
        try:
            await opened.sweep()
        except (StorageError, sqlite3.Error) as error:
            logger.warning("expired files cannot be deleted: %s", error)
        await trio.sleep(SWEEP_S)

"""The private folder of a server's processes: the sockets between them, and files with numbers that they share."""

import fcntl
import io
import logging
import math
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import trio

from trio_pool_serve.errors import ModelLoadError

logger = logging.getLogger(__name__)

BACKLOG = 128

CHECK_S = 1.0
"""Interval at which the folder and the sockets are checked for removal."""

PREFIX = "trio_pool_serve-"


class SocketFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that only this user can enter; creating one removes the folders of killed servers.

    Its owner holds a lock on it, which ends with the process.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        while True:
            super().__init__(prefix=PREFIX, ignore_cleanup_errors=True)
            with suppress(FileNotFoundError):
                self._lock = _lock(self.name)
                if Path(self.name).exists():
                    return
                os.close(self._lock)
            super().cleanup()  # another server, which starts now, has removed it before it was locked

    async def keep(self) -> NoReturn:
        """Recreate the folder whenever it is removed, by a cleaner of temporary files for example. Runs forever.

        So are the folders above it. The processes that listen or write there do so again, as in ``serve_at``.
        Cancellation: at once.
        """
        failure, folder = "", Path(self.name)
        while True:
            await trio.sleep(CHECK_S)
            if is_private(folder):
                continue
            try:
                folder.mkdir(mode=0o700, parents=True)  # noqa: ASYNC240  (in memory)
                before, self._lock = self._lock, _lock(self.name)
                os.close(before)
                logger.warning("%s was removed, and was created again", self.name)
            except OSError as error:
                if str(error) != failure:  # not at each attempt
                    failure = str(error)
                    logger.error("%s was removed, and cannot be created again: %s", self.name, failure)  # noqa: TRY400

    def cleanup(self) -> None:
        """Remove the folder, if that has not been done."""
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_private(folder: Path) -> bool:
    """Return whether a folder exists and is this user's; another user may create one where ours was removed."""
    with suppress(FileNotFoundError):
        return folder.lstat().st_uid == os.geteuid()
    return False


async def serve_at(
    path: Path,
    serve: Callable[[list[trio.SocketListener]], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``serve`` with a listener at ``path``, and again with a new one whenever that is removed; forever.

    Started once it listens. Raises ``ModelLoadError`` if it cannot: Linux limits paths to 108 characters, for example.
    Cancellation: at once; the socket is removed.
    """
    listener, bound = _listen_at(path)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, [listener])
            task_status.started()
            while True:
                await trio.sleep(CHECK_S)
                if not _number_of(path) and is_private(path.parent):
                    with suppress(ModelLoadError):
                        listener, bound = _listen_at(path)
                        nursery.start_soon(serve, [listener])
    finally:
        if _number_of(path) == bound:  # no other process has taken its place
            path.unlink(missing_ok=True)  # noqa: ASYNC240  (in memory)


def _number_of(path: Path) -> int:
    """Return the inode number of a file; 0 if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0


def _listen_at(path: Path) -> tuple[trio.SocketListener, int]:
    """Return a listener, which replaces the socket of a dead process, and the inode number of its file."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(listening)), _number_of(path)
    except OSError as error:
        listening.close()
        raise ModelLoadError(f"The server's socket {path} cannot be bound: {error}") from error


def _lock(folder: str) -> int:
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, gone, or locked by its owner
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(folder)


def shared_array(path: Path, *shape: int) -> npt.NDArray[np.float64]:
    """Map the file at ``path`` as a float64 array; create it with zeros if it does not exist. Raises ``OSError``.

    Each process writes only its own numbers: nothing is locked.
    """
    nbytes = 8 * math.prod(shape)
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.float64).reshape(shape)


def open_with_shared_lock(path: Path) -> io.FileIO:
    """Open a file, which is created if it does not exist, with a lock that others may share. Raises ``OSError``.

    Processes that inherit it hold the lock, too, until the last of them ends. Without a lock, another process holds it
    alone.
    """
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file

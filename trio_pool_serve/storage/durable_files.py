"""Files whose bytes are on the disk when a call returns. All functions block."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from attrs import define

from trio_pool_serve.errors import StorageBusyError, StorageError, StorageFullError, StorageLostError, require

KINDS: dict[int, type[StorageError]] = {
    errno.ENOENT: StorageLostError,
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EMFILE: StorageBusyError,
    errno.ENFILE: StorageBusyError,
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise a ``StorageError`` for each ``OSError`` about a file: disk full, permission denied."""
    try:
        yield
    except OSError as error:
        kind = KINDS.get(error.errno or 0, StorageError)
        raise kind(f"{path}: {error.strerror or error}.") from error


def make_durable(path: Path) -> None:
    """Sync a file's bytes to the disk, or a folder's entries: files created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file, or folder of files, to its final name, durably.

    After a crash it has all of its bytes, or does not exist. A folder can only replace an empty one.
    """
    with storage_errors(path):
        for part in (*temporary.rglob("*"), temporary):
            make_durable(part)
        temporary.replace(path)
        make_durable(path.parent)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder durably, unless it exists; its parent must exist. Raises ``StorageError``."""
    with storage_errors(folder):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)
            make_durable(folder.parent)


def remove_files(folder: Path, paths: Collection[Path]) -> None:
    """Remove files of a folder durably."""
    for path in paths:
        with storage_errors(path):
            path.unlink()
    if paths:
        with storage_errors(folder):
            make_durable(folder)


@define(eq=False)
class AppendedFile:
    """A file to which bytes are appended; its bytes up to ``length`` are valid."""

    path: Path
    file: BinaryIO
    length: int

    def append(self, data: bytes) -> None:
        """Append bytes. Raises ``StorageError``; then the bytes since the last ``sync`` are not valid."""
        with storage_errors(self.path):
            view = memoryview(data)
            while view:
                view = view[self.file.write(view) :]
        self.length += len(data)

    def sync(self) -> int:
        """Sync all appended bytes to the disk; return the length. Raises ``StorageError``."""
        with storage_errors(self.path):
            os.fsync(self.file.fileno())
        return self.length

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_appended(path: Path, length: int) -> AppendedFile:
    """Open a file to append to it, truncated to ``length``: later bytes were never committed.

    With length 0, the file is created, or emptied if it exists. Raises ``StorageError``, and ``StorageLostError`` if
    the file is shorter or has been deleted.
    """
    with storage_errors(path):
        require(
            not length or path.exists(),
            f"{path} has been deleted; {length} bytes were written to it.",
            StorageLostError,
        )
        if length and (size := path.stat().st_size) < length:
            raise StorageLostError(f"{path} has been changed: it has {size} bytes, but {length} bytes were written.")
        file = path.open("r+b" if length else "w+b", buffering=0)
        if os.fstat(file.fileno()).st_size > length:  # a file that is complete keeps its time
            file.truncate(length)
        file.seek(length)
        if not length:
            make_durable(path.parent)
    return AppendedFile(path, file, length)

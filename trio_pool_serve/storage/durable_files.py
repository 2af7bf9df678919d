"""Files whose bytes are on the disk when a call returns. All functions block."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from attrs import define

from trio_pool_serve.errors import StorageBusyError, StorageError, StorageFullError, StorageLostError


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise ``StorageError`` for what the system says about a file: that the disk is full, or permission denied."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageLostError(f"{path}: {error.strerror}.") from error
    except OSError as error:
        kind = StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        kind = StorageBusyError if error.errno in (errno.EMFILE, errno.ENFILE) else kind
        raise kind(f"{path}: {error.strerror or error}.") from error


def make_durable(path: Path) -> None:
    """Make a file's bytes durable, or of a folder which files were renamed, created and removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Rename what is complete, a file or a folder of files, to its name, durably.

    After a crash it has all of its bytes, or is not there. A folder replaces an empty one at most.
    """
    with storage_errors(path):
        for part in (*temporary.rglob("*"), temporary):
            make_durable(part)
        temporary.replace(path)
        make_durable(path.parent)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder durably, unless it is there; its parent has to be. Raises ``StorageError``."""
    with storage_errors(folder):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)
            make_durable(folder.parent)


def remove_files(folder: Path, paths: Iterable[Path]) -> None:
    """Remove files of a folder durably."""
    removed = False
    for path in paths:
        with storage_errors(path):
            path.unlink()
        removed = True
    if removed:
        with storage_errors(folder):
            make_durable(folder)


@define(eq=False)
class AppendedFile:
    """A file that grows at its end, from a length up to which its bytes count."""

    path: Path
    file: BinaryIO
    length: int

    def append(self, data: bytes) -> None:
        """Write at the end. Raises ``StorageError``; then what was written since ``sync`` does not count."""
        with storage_errors(self.path):
            view = memoryview(data)
            while view:
                view = view[self.file.write(view) :]
        self.length += len(data)

    def sync(self) -> int:
        """Make all that was appended durable; return the length. Raises ``StorageError``."""
        with storage_errors(self.path):
            os.fsync(self.file.fileno())
        return self.length

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_appended(path: Path, length: int) -> AppendedFile:
    """Open a file to append to it, cut off at ``length``: what lies behind was never committed.

    It is created for a length of 0, where a file that is already there is cut off, too. Raises ``StorageError``, and
    ``StorageLostError`` if the file is shorter or has been deleted.
    """
    with storage_errors(path):
        if length:
            _check_length(path, length)
        file = path.open("r+b" if length else "w+b", buffering=0)
        if os.fstat(file.fileno()).st_size > length:  # a file that is complete keeps its time
            file.truncate(length)
        file.seek(length)
        if not length:
            make_durable(path.parent)
    return AppendedFile(path, file, length)


def _check_length(path: Path, length: int) -> None:
    if not path.exists():
        raise StorageLostError(f"{path} has been deleted: {length} bytes had been written to it.")
    size = path.stat().st_size
    if size < length:
        raise StorageLostError(f"{path} has {size} bytes, where {length} had been written: it has been changed.")

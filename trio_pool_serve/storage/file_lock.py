"""Locks between processes, on files that exist only while they are locked."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Lock this path against other processes and threads, and yield ``True``.

    While another one holds the lock, block without a limit, or yield ``False`` if it does not wait. Makes the folder if
    it does not exist. If nothing can be locked, in a read-only folder or on a file system without locks, yield ``True``
    at once.
    """
    try:
        lock = _lock(path, waits=waits)
    except BlockingIOError:
        yield False
        return
    except OSError:
        yield True
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def _lock(path: Path, *, waits: bool) -> int:
    """Return a descriptor that holds the lock. Raises ``OSError``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == path.stat().st_ino:
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # the last holder of the lock has removed its file

"""Turns of processes, by locks on files that are there only meanwhile."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Keep other processes and threads out of blocks that lock this path.

    Blocks, without a limit, while another has it locked; if it does not wait, it yields ``False`` instead. Makes the
    folder if there is none. Where nothing can be locked, as the folder is not writable or the file system has no locks,
    it yields ``True`` at once.
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

"""The private folder of the sockets between a server's processes."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "trio_pool_serve-"

ABANDONED_S = 60.0
"""Younger folders are left alone: their owner may not have locked them yet."""


class SocketFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that only this user can enter; making one removes those of servers that were killed.

    Its owner holds a lock on it, which ends with the process.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        super().__init__(prefix=PREFIX)
        self._lock = os.open(self.name, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove the folder; again, it does nothing."""
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, gone, or locked by its owner
            if path.stat().st_mtime > time.time() - ABANDONED_S:
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(folder)

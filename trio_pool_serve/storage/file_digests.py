"""SHA-256 of files, remembered between processes while a file stays the same. All functions block."""

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from trio_pool_serve.storage.file_lock import locked

SMALL_FILE = 64 * 2**10
"""Files up to this size are read each time, which takes as long as a lookup."""

MOST_FILES = 2048
"""Files that are remembered, the latest ones: 400 KB."""

SETTLED_S = 2.0
"""A file changed more recently may be changed again with the same time: clocks of file systems have ticks of up to two
seconds (FAT)."""


class ModelDigest(NamedTuple):
    """SHA-256 digests, in hexadecimal, of a model's small files and settings, and of its weights; empty if unknown."""

    files: str
    weights: str

    def agrees_with(self, other: "ModelDigest") -> bool:
        """Return whether both are of the same model, as far as is known."""
        return self.files == other.files and ("" in (self.weights, other.weights) or self.weights == other.weights)


class RememberedFile(NamedTuple):
    """A file as it was when it was read. ``change_ns`` also changes if the time of modification was set back."""

    size: int
    modification_ns: int
    change_ns: int
    inode: int
    sha256: str

    @classmethod
    def of(cls, status: os.stat_result, sha256: str) -> "RememberedFile":
        """Return the record of a file with this status and digest."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256)


def file_digests(paths: Iterable[Path], memory: Path | None) -> dict[Path, str]:
    """Return the SHA-256 of each file's content, in hexadecimal.

    The file ``memory`` has the digests that this and other processes found before, and this call adds its own if it is
    writable; if it is lost or damaged, it is created anew. A file with the same size, times and inode under the same
    resolved path is not read again. With ``None`` all files are read. Raises ``OSError`` for unreadable files.
    """
    remembered = {} if memory is None else _read(memory)
    found, new = {}, {}
    for path in paths:
        real = path.resolve()
        status = real.stat()
        known = remembered.get(str(real))
        if known is not None and known == RememberedFile.of(status, known.sha256):
            found[path] = known.sha256
            continue
        file = read_file(real)
        found[path] = file.sha256
        if file.size > SMALL_FILE and file.modification_ns < (time.time() - SETTLED_S) * 1e9:
            new[str(real)] = file
    if memory is not None and new:
        remember(memory, new)
    return found


def read_file(path: Path) -> RememberedFile:
    """Read a file; return its digest, with its status before it was read. Raises ``OSError``."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        return RememberedFile.of(status, hashlib.file_digest(file, "sha256").hexdigest())


def remember(memory: Path, files: Mapping[str, RememberedFile]) -> None:
    """Remember more files by their resolved paths; do nothing if ``memory`` cannot be written."""
    with suppress(OSError), locked(memory.with_suffix(".lock")):
        merged = {path: file for path, file in _read(memory).items() if path not in files} | dict(files)
        kept = dict([*merged.items()][-MOST_FILES:])
        new = memory.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(kept))
        new.chmod(0o600)
        new.replace(memory)


def _read(memory: Path) -> dict[str, RememberedFile]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, RememberedFile])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}

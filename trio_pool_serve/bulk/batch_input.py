"""The input of ``run-batch`` as it was when a run began."""

import os
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from trio_pool_serve.bulk.inputs.fingerprint import FilePrint, Fingerprint
from trio_pool_serve.errors import InputChangedError
from trio_pool_serve.storage.durable_files import storage_errors

READ_BYTES = 2**20


@frozen
class BatchInput:
    """A file that was scanned: its fingerprint, with the number of lines that are not blank."""

    path: Path
    fingerprint: Fingerprint

    @property
    def file(self) -> FilePrint:
        """The print of the file."""
        return self.fingerprint.files[0]

    @property
    def changed_s(self) -> int:
        """When the file was changed, in seconds since the epoch."""
        return self.file.mtime_ns // 10**9

    def check_unchanged(self) -> None:
        """Raise ``InputChangedError`` if the file was changed since. Blocks."""
        with storage_errors(self.path):
            found = self.path.stat()
        if (found.st_size, found.st_mtime_ns) != (self.file.n_bytes, self.file.mtime_ns):
            raise InputChangedError(f"{self.path} was changed while it was read.")


def scan_batch_input(path: Path, name: str) -> BatchInput:
    """Read a file, for which ``name`` is kept. Blocks. Raises ``StorageError``."""
    with storage_errors(path), path.open("rb") as file:
        before = os.fstat(file.fileno())
        digest, n_bytes, lines = _scan(file)
    found = FilePrint(name, n_bytes, digest, before.st_mtime_ns)
    return BatchInput(path, Fingerprint((found,), rows=lines))


def _scan(file: BinaryIO) -> tuple[str, int, int]:
    digest, n_bytes, lines, is_counted = blake2b(digest_size=16), 0, 0, False
    for part in iter(partial(file.readline, READ_BYTES), b""):
        digest.update(part)
        n_bytes += len(part)
        if not is_counted and not part.isspace():
            lines, is_counted = lines + 1, True
        if part.endswith(b"\n"):
            is_counted = False
    return digest.hexdigest(), n_bytes, lines

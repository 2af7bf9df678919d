"""Converted models on disk: one entry for each model folder and kind of conversion.

An entry is a folder with the model in OpenVINO's format and a record, which has the files' checksums. It is written
under another name and renamed, and replaced when its digest is not the current one. Processes that want the same entry
take turns: the first one converts, the others read.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from attrs import define, field, frozen

from trio_pool_serve.errors import StorageError
from trio_pool_serve.storage.durable_files import publish

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of what is cached; increased whenever the conversion, the quantisation or the record changes."""

MODEL = "model.xml"
"""The model in OpenVINO's format; its weights are beside it."""

LIBRARIES = ("openvino", "nncf", "torch", "transformers")

SMALL_FILE = 64 * 2**10
"""Files up to this size are read for the digest; of larger ones, such as weights, size and time of change count."""

ABANDONED_S = 24 * 60 * 60
"""Age of unfinished entries that are removed: the process that wrote them has died."""


@frozen
class Record:
    """What is known about a converted model.

    ``short_cosine`` is the lowest cosine with the backbone of the rows that each start compares. ``mean_cosine`` and
    ``lowest_cosine`` are those of a quantised model with float32, on texts. ``time_ratios`` has the result of the trial
    of speed for each machine, by ``machine_name``: ``None`` where OpenVINO was chosen without one, as it could not be
    timed. ``checksums`` has the SHA-256 of each file of the model.
    """

    short_cosine: float
    mean_cosine: float | None = None
    lowest_cosine: float | None = None
    time_ratios: dict[str, float | None] = field(factory=dict)
    checksums: dict[str, str] = field(factory=dict)


@frozen
class _Stored:
    """The content of a record's file."""

    digest: str
    record: Record


@define(eq=False)
class CacheEntry:
    """One converted model on disk. What cannot be read is missing."""

    path: Path
    digest: str

    @property
    def _record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def prefix(self) -> str:
        """What the names of folders begin with that may become this entry, or were it."""
        return f".{self.path.name}."

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of blocks that lock this entry. Waits for them, seconds to minutes."""
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            yield  # ``write`` reports that the folder is not writable
            return
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read(self) -> Record | None:
        """Return the record of the cached model; ``None`` if there is none, or only one of another digest."""
        try:
            stored = msgspec.json.decode(self._record_path.read_bytes(), type=_Stored)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        return stored.record if stored.digest == self.digest else None

    def publish(self, folder: Path, record: Record) -> None:
        """Replace the entry by a folder of ``saved``, durably; does nothing with a temporary one. Logs a failure."""
        if not folder.name.startswith(self.prefix):
            return
        try:
            (folder / self._record_path.name).write_bytes(self._encode(record))
            for file in folder.iterdir():
                file.chmod(0o600)
            doomed = self.path.with_name(f"{self.prefix}{os.getpid()}.removed")
            with suppress(FileNotFoundError):
                self.path.rename(doomed)  # which removes it all at once for other processes
            shutil.rmtree(doomed, ignore_errors=True)
            publish(folder, self.path)
        except (OSError, StorageError) as error:
            _log_not_cached(self.path.parent, error)

    def update(self, record: Record) -> None:
        """Replace the record of an entry that was written; does nothing if there is none."""
        with suppress(OSError, StorageError):
            new = self._record_path.with_suffix(f".{os.getpid()}")
            new.write_bytes(self._encode(record))
            new.chmod(0o600)
            publish(new, self._record_path)

    def _encode(self, record: Record) -> bytes:
        return msgspec.json.format(msgspec.json.encode(_Stored(self.digest, record)))

    def remove_abandoned(self) -> None:
        """Remove what processes that died while they wrote or removed this entry left behind. Raises ``OSError``."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(self.prefix) and path.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def saved(save: Callable[[Path], None], entry: CacheEntry | None) -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder in which ``save`` has written a model to the path that it is given.

    It lies beside the entry, or among temporary files if there is no entry or it cannot be written, which is logged.
    Its cleanup leaves it if it has become the entry. Raises ``OSError``, and what ``save`` raises.
    """
    if entry is not None:
        try:
            entry.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # which says why it cannot be made
            entry.remove_abandoned()
            return _saved_in(entry.path.parent, entry.prefix, save)
        except (OSError, RuntimeError) as error:  # OpenVINO reports a full disk as a RuntimeError
            _log_not_cached(entry.path.parent, error)
    return _saved_in(None, "trio_pool_serve.", save)


def _saved_in(parent: Path | None, prefix: str, save: Callable[[Path], None]) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    try:
        save(Path(folder.name) / MODEL)
    except BaseException as error:
        # Of a full disk OpenVINO says "basic_ios::clear: iostream error".
        is_full = isinstance(error, RuntimeError) and shutil.disk_usage(folder.name).free < 2**20
        folder.cleanup()  # now: its part of a model may fill the disk that is tried next
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder.name) from error
        raise
    return folder


def _log_not_cached(folder: Path, error: Exception) -> None:
    logger.warning("the converted model is not cached in %s: %s", folder, error)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder's model: 0.3 s for 440 MB. Raises ``OSError``."""
    found = {}
    for name in (MODEL, "model.bin"):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def cache_entry(cache_dir: Path, model_folder: Path, *conversion: str) -> CacheEntry:
    """Return the entry of a model's folder and a kind of conversion, which the words of ``conversion`` tell apart."""
    model_folder = model_folder.resolve()
    name = hashlib.sha256("\n".join((str(model_folder), *conversion)).encode()).hexdigest()[:16]
    return CacheEntry(cache_dir / f"{model_folder.name}-{name}", model_digest(model_folder))


def model_digest(folder: Path) -> str:
    """Return a digest of a model's files and of everything else that a conversion depends on."""
    digest = hashlib.sha256(f"{FORMAT}\n".encode())
    for library in LIBRARIES:
        digest.update(f"{library} {_version(library)}\n".encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            status = path.stat()
            digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
            if status.st_size <= SMALL_FILE:
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def default_cache_dir() -> Path | None:
    """Return where to cache unless a setting says otherwise; ``None`` for a user without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "trio_pool_serve"
    except RuntimeError:
        return None

"""Converted models on disk: an entry for each content of a model's files and each kind of conversion.

An entry is a folder of files with a record of their digests. It is written under another name and renamed, so it is
complete or does not exist. Processes that need the same entry take turns: the first one converts, the others read. The
least recently used entries are removed for new ones. All methods block.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import msgspec
from attrs import field, frozen

from trio_pool_serve.errors import StorageError, StorageFullError
from trio_pool_serve.storage.durable_files import publish, storage_errors
from trio_pool_serve.storage.file_digests import SETTLED_S, RememberedFile, file_digests, read_file, remember
from trio_pool_serve.storage.file_lock import locked

logger = logging.getLogger(__name__)

LIMIT_BYTES = 10 * 2**30
"""Maximum size of all entries together."""

IN_USE_S = 60 * 60
"""An entry is not removed for others this long after its last use: a process may be reading it."""

ABANDONED_S = 24 * 60 * 60
"""Age at which unfinished entries are removed: the process that wrote them has died."""

ENTRY = re.compile(r"[^.].*-[0-9a-f]{16}")
UNFINISHED = re.compile(r"\.(.*-)?[0-9a-f]{16}\..*")
"""Names of this cache's folders. Others are never removed: the folder may be used for more than the cache."""

FORMAT = 5
"""Version of the entries; increase it whenever the conversion, the quantisation or the record changes."""

RECORD = "record.json"

T = TypeVar("T")


@frozen(kw_only=True)
class RecordBase:
    """The parts that every record may have: a description, and the versions of the libraries that made the entry."""

    what: str = ""
    versions: dict[str, str] = field(factory=dict)


@frozen
class _Stored:
    """The content of a record's file; ``files`` maps the path of each file in the entry to its SHA-256."""

    format: int
    files: dict[str, str]
    record: msgspec.Raw


def installed_versions(*libraries: str) -> dict[str, str]:
    """Return the versions of the installed ones of these libraries."""
    versions = {}
    for library in libraries:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


def read_record(path: Path, record_type: type[T]) -> tuple[T, dict[str, str]] | None:
    """Return the record of an entry's folder, and the SHA-256 of each file.

    ``None`` if there is none, if it has another ``FORMAT``, or cannot be decoded.
    """
    try:
        stored = msgspec.json.decode((path / RECORD).read_bytes(), type=_Stored)
        return (msgspec.json.decode(stored.record, type=record_type), stored.files) if stored.format == FORMAT else None
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


@frozen
class EntrySummary:
    """An entry as ``cache list`` shows it. ``used_at`` is in seconds since the epoch.

    ``about`` is ``None`` for an entry that is never read: with another ``FORMAT``, or damaged.
    """

    name: str
    size_bytes: int
    used_at: float
    about: RecordBase | None


@frozen
class ModelCache:
    """The entries in a folder."""

    folder: Path

    @classmethod
    def of(cls, cache_dir: str | None) -> "ModelCache | None":
        """Return the cache for ``--cache-dir``; ``None`` if nothing is cached.

        Nothing is cached with an empty value, or with none for a user without a home directory.
        """
        if cache_dir is not None:
            return cls(Path(cache_dir).expanduser().absolute()) if cache_dir else None
        base = os.environ.get("XDG_CACHE_HOME", "")
        with suppress(RuntimeError):
            return cls((Path(base) if base.startswith("/") else Path.home() / ".cache") / "trio_pool_serve")
        return None

    def entry(self, name: str, *key: str) -> "CacheEntry":
        """Return the entry for the words of ``key``. ``name`` is for people, and not part of the key."""
        readable = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".")[:40] or "model"
        return CacheEntry(self, readable, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])

    @property
    def memory(self) -> Path:
        """The file in which digests are remembered."""
        return self.folder / "digests.json"

    def digest(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Return the SHA-256 of each file, as ``file_digests``. Raises ``OSError``."""
        return file_digests(paths, self.memory)

    def entries(self) -> list[EntrySummary]:
        """Return all entries, the last used first. Raises ``StorageError`` if the cache cannot be read."""
        found = []
        with storage_errors(self.folder):
            paths = [*self.folder.iterdir()] if self.folder.exists() else []
        for path in paths:
            with suppress(OSError):  # it has just been removed
                if ENTRY.fullmatch(path.name) and (path / RECORD).is_file() and not path.is_symlink():
                    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    about, _ = read_record(path, RecordBase) or (None, {})
                    found.append(EntrySummary(path.name, size, path.stat().st_mtime, about))
        return sorted(found, key=lambda entry: entry.used_at, reverse=True)

    def remove(self, entry: EntrySummary, *, even_if_used: bool = True) -> bool:
        """Remove an entry; return ``False`` if a process has it locked or, without ``even_if_used``, has used it since.

        Raises ``StorageError``. Processes that have loaded it are not disturbed: the bytes stay until they end.
        """
        path = self.folder / entry.name
        with locked(self.lock_path(path.name[-16:]), waits=False) as is_mine, storage_errors(path):
            may_be = is_mine and (even_if_used or path.stat().st_mtime == entry.used_at)
            if may_be:
                _discard(path)
            return may_be

    def make_room(self, limit_bytes: int = 0) -> int:
        """Remove the least recently used entries until all are at most ``limit_bytes``; return the bytes removed.

        Entries that were used within the last hour, or that a process has locked, stay.
        """
        removed = 0
        with suppress(StorageError), locked(self.folder / "removal.lock"):
            entries = self.entries()
            size = sum(entry.size_bytes for entry in entries)
            for entry in reversed(entries):
                if size - removed <= limit_bytes or entry.used_at > time.time() - IN_USE_S:
                    break
                with suppress(StorageError):
                    if self.remove(entry, even_if_used=False):
                        logger.info("removed %s from the cache: last used %s", entry.name, time.ctime(entry.used_at))
                        removed += entry.size_bytes
        return removed

    def lock_path(self, key: str) -> Path:
        """Return the path that locks an entry."""
        return self.folder / f"{key}.lock"

    def remove_abandoned(self) -> None:
        """Remove folders of processes that died while writing or removing an entry. Raises ``OSError``."""
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                if UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < time.time() - ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


@frozen
class CacheEntry:
    """One entry, which may be missing. An unreadable entry counts as missing."""

    cache: ModelCache
    name: str
    key: str

    @property
    def path(self) -> Path:
        """The folder of the entry, whatever name it was made under, or where it will be."""
        return next(self.cache.folder.glob(f"[!.]*-{self.key}"), self.cache.folder / f"{self.name}-{self.key}")

    def locked(self) -> AbstractContextManager[bool]:
        """Lock this entry against other processes. Waits for them, seconds to minutes.

        Nobody waits if the folder is not writable.
        """
        return locked(self.cache.lock_path(self.key))

    def read(self, record_type: type[T]) -> T | None:
        """Return the record, and mark the entry as used.

        ``None`` if there is none, if it has another ``FORMAT`` or cannot be decoded as ``record_type``, or if a file
        differs from its digest. Files that have not changed since a process read them are not read again.
        """
        path = self.path
        stored = read_record(path, record_type)
        if stored is None:
            return None
        record, files = stored
        try:
            found = self.cache.digest(path / name for name in files)
            if changed := [name for name, digest in files.items() if found[path / name] != digest]:
                raise OSError(f"{changed[0]} has been changed")  # noqa: TRY301
        except OSError as error:
            logger.warning("%s is damaged, and not used: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return record

    def put(self, write: Callable[[Path], T]) -> tuple[Path, T] | None:
        """Replace the entry, durably, with files that ``write`` puts into an empty folder; return its path and record.

        ``write`` returns the record: anything that msgspec can encode and ``read`` can decode. ``cache list`` shows the
        attributes of ``RecordBase``. ``None`` if the entry cannot be kept, which is logged, also if ``write`` raises
        ``OSError``. If the disk is full, ``write`` is called again after entries not used within the last hour were
        removed, if there were any.
        """
        try:
            try:
                made = self._put(write)
            except StorageFullError:
                if not self.cache.make_room():
                    raise
                made = self._put(write)
        except StorageError as error:
            logger.warning("%s is not cached: %s", self.name, error)
            return None
        self.cache.make_room(LIMIT_BYTES)
        return made

    def _put(self, write: Callable[[Path], T]) -> tuple[Path, T]:
        with storage_errors(self.cache.folder):
            self.cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.cache.remove_abandoned()
            temporary = _temporary_folder(self.cache.folder, f".{self.key}.")
        path = self.path
        with storage_errors(path), temporary as name:
            folder = Path(name)
            record = write(folder)
            files = {file.relative_to(folder): _read_settled(file) for file in folder.rglob("*") if file.is_file()}
            digests = {name.as_posix(): file.sha256 for name, file in files.items()}
            stored = _Stored(FORMAT, digests, msgspec.Raw(msgspec.json.encode(record)))
            (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
            (folder / RECORD).chmod(0o600)
            with suppress(FileNotFoundError):
                _discard(path)
            publish(folder, path)
        remember(self.cache.memory, {str(path.resolve() / name): file for name, file in files.items()})
        return path, record


@contextmanager
def written(write: Callable[[Path], T], entry: CacheEntry | None) -> Iterator[tuple[Path, T]]:
    """Yield the folder of ``entry`` with the files that ``write`` wrote, and the record that it returned.

    If there is no entry, or it cannot be kept, ``write`` is called for a temporary folder. Raises ``StorageError``,
    ``OSError``, and whatever ``write`` raises.
    """
    made = None if entry is None else entry.put(write)
    if made is not None:
        yield made
        return
    with _temporary_folder(None, "trio_pool_serve.") as name:
        folder = Path(name)
        with storage_errors(folder):
            record = write(folder)
        yield folder, record


def _temporary_folder(parent: Path | None, prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder, which is removed at the end unless it was renamed."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)


def _read_settled(file: Path) -> RememberedFile:
    """Return the digest of a complete file, set back in time so that a change right now gives it another time."""
    file.chmod(0o600)
    os.utime(file, (time.time() - 2 * SETTLED_S,) * 2)
    return read_file(file)


def _discard(path: Path) -> None:
    """Remove a folder, at once for other processes. Raises ``OSError``."""
    shutil.rmtree(path.replace(path.with_name(f".{path.name[-16:]}.{token_hex(4)}")), ignore_errors=True)

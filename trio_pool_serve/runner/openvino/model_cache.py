"""Converted models on disk: one entry for each model folder and kind of conversion.

An entry is a folder with the model in OpenVINO's format and a record. It is written under another name and renamed, and
replaced when its digest is not the current one. Processes that want the same entry take turns: the first one converts,
the others read.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attrs import asdict, define, evolve, field, frozen

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of what is cached; increased whenever the conversion, the quantisation or the record changes."""

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
    of speed for each machine, by ``machine_name``.
    """

    short_cosine: float
    mean_cosine: float | None = None
    lowest_cosine: float | None = None
    time_ratios: dict[str, float] = field(factory=dict)


@define(eq=False)
class CacheEntry:
    """One converted model on disk. No method raises ``OSError``: what cannot be read is missing."""

    path: Path
    digest: str

    @property
    def model_path(self) -> Path:
        """The model in OpenVINO's format."""
        return self.path / "model.xml"

    @property
    def _record_path(self) -> Path:
        return self.path / "record.json"

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
            stored = json.loads(self._record_path.read_text())
            return Record(**stored["record"]) if stored["digest"] == self.digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, save: Callable[[Path], None], record: Record) -> None:
        """Replace the entry. ``save`` writes the model to the path that it is given. Logs a failure."""
        try:
            self._remove_abandoned()
            new = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
            try:
                save(new / self.model_path.name)
                (new / self._record_path.name).write_text(self._encode(record))
                for file in new.iterdir():
                    file.chmod(0o600)
                _remove(self.path)
                new.rename(self.path)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except (OSError, RuntimeError) as error:  # OpenVINO reports a full disk as a RuntimeError
            logger.warning("the converted model is not cached in %s: %s", self.path.parent, error)

    def update(self, record: Record) -> None:
        """Replace the record of an entry that was written; does nothing if there is none."""
        with suppress(OSError):
            new = self._record_path.with_suffix(f".{os.getpid()}")
            new.write_text(self._encode(record))
            new.chmod(0o600)
            new.rename(self._record_path)

    def _encode(self, record: Record) -> str:
        return json.dumps({"digest": self.digest, "record": asdict(record)}, indent=2)

    def _remove_abandoned(self) -> None:
        """Remove what processes that died while they wrote or removed this entry have left behind."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(f".{self.path.name}.") and path.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def with_time_ratio(record: Record, machine: str, ratio: float) -> Record:
    """Return the record with the result of one more trial."""
    return evolve(record, time_ratios={**record.time_ratios, machine: ratio})


def _remove(folder: Path) -> None:
    """Remove an entry, all at once for other processes."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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

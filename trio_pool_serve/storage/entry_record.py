"""The records of cached models: what each entry is, and the digests of its files."""

from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import field, frozen

from trio_pool_serve.storage.durable_files import publish
from trio_pool_serve.storage.file_lock import locked

FORMAT = 3
"""Version of what is cached; increased whenever the conversion, the quantisation or the record changes."""

RECORD = "record.json"

T = TypeVar("T")


@frozen(kw_only=True)
class RecordBase:
    """What the record of any entry may tell about it: what it is, and the versions of the libraries that made it."""

    what: str = ""
    versions: dict[str, str] = field(factory=dict)


@frozen
class _Stored:
    """The content of a record's file. ``files`` has the SHA-256 of each file by its path in the entry."""

    format: int
    files: dict[str, str]
    record: msgspec.Raw


def write_record(path: Path, files: dict[str, str], record: object) -> None:
    """Write a record with the SHA-256 of each file, by its path in the entry. Raises ``OSError``."""
    stored = _Stored(FORMAT, files, msgspec.Raw(msgspec.json.encode(record)))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    path.chmod(0o600)


def replace_record(path: Path, record: object) -> None:
    """Replace the record of an entry's folder, if it has one. Raises ``OSError`` and ``StorageError``."""
    with locked(path / "record.lock"):
        stored = _read_stored(path)
        if stored is not None:
            new = path / "record.new"
            write_record(new, stored.files, record)
            publish(new, path / RECORD)


def read_record(path: Path, record_type: type[T]) -> tuple[T, dict[str, str]] | None:
    """Return the record of an entry's folder, and the SHA-256 of each file.

    ``None`` if there is none, if it is of another ``FORMAT``, or cannot be decoded.
    """
    stored = _read_stored(path)
    record = None if stored is None else _decode(stored.record, record_type)
    return None if stored is None or record is None else (record, stored.files)


def _read_stored(path: Path) -> _Stored | None:
    """Return the record's file of an entry; ``None`` for none of this ``FORMAT``."""
    try:
        stored = _decode((path / RECORD).read_bytes(), _Stored)
    except OSError:
        return None
    return stored if stored is not None and stored.format == FORMAT else None


def _decode(data: bytes | msgspec.Raw, decoded_type: type[T]) -> T | None:
    try:
        return msgspec.json.decode(data, type=decoded_type)
    except (msgspec.DecodeError, RecursionError):
        return None

"""The records of cached models: what each entry is, and the digests of its files."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import field, frozen

FORMAT = 5
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


def installed_versions(*libraries: str) -> dict[str, str]:
    """Return the versions of libraries, as far as they are installed."""
    versions = {}
    for library in libraries:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


def write_record(path: Path, files: dict[str, str], record: object) -> None:
    """Write a record with the SHA-256 of each file, by its path in the entry. Raises ``OSError``."""
    stored = _Stored(FORMAT, files, msgspec.Raw(msgspec.json.encode(record)))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    path.chmod(0o600)


def read_record(path: Path, record_type: type[T]) -> tuple[T, dict[str, str]] | None:
    """Return the record of an entry's folder, and the SHA-256 of each file.

    ``None`` if there is none, if it is of another ``FORMAT``, or cannot be decoded.
    """
    try:
        stored = msgspec.json.decode((path / RECORD).read_bytes(), type=_Stored)
        return (msgspec.json.decode(stored.record, type=record_type), stored.files) if stored.format == FORMAT else None
    except (OSError, msgspec.DecodeError, RecursionError):
        return None

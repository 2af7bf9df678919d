"""The file of ``--api-keys-file``: a TOML table for each key."""

import logging
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
"""Some ten thousand keys. A longer file, such as a device, is cut off, and then invalid."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A key's name; never an address or another label of a client without a key."""

Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=2**53)]


class _Permissions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The permissions and limits of a key, in the file and in the server."""

    models: Annotated[frozenset[str], msgspec.Meta(min_length=1)] | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None
    max_body_bytes: Positive | None = None
    may_outrank: bool = False
    admin: bool = False


class ApiKey(_Permissions, frozen=True, kw_only=True):
    """An API key and its permissions; ``name`` is its client's label in logs and queues.

    ``models`` are the names of the models that it may use, ``None`` for all. With ``admin`` it may also use the
    operators' routes. ``may_outrank`` is that of ``types.Client``.
    """

    name: str


class _Table(_Permissions, frozen=True, kw_only=True):
    """One table of the file, as written."""

    key: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None


def digest_of(key: str) -> bytes:
    """Return the digest under which a key is looked up."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def read_key_file(path: Path, known_models: Collection[str] | None) -> dict[bytes, ApiKey]:
    """Return the keys of a file by digest. Blocking.

    Raises ``ValueError`` for an invalid file, for a model that is not in ``known_models`` (unless ``None``), and for
    two tables with the same key; ``OSError`` if the file cannot be read. No message quotes a key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
        return _keys_of(tomllib.loads(content.decode()), known_models)
    except UnicodeDecodeError:
        raise ValueError(f"--api-keys-file {path}: it is not UTF-8.") from None  # the error has the file's bytes
    except ValueError as error:
        raise ValueError(f"--api-keys-file {path}: {error}.") from None


def warn_of_readers(path: Path) -> None:
    """Log a warning if other users can read the file. Blocking."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("other users can read the file of --api-keys-file (mode %o): run chmod 600", stat.S_IMODE(mode))


def _keys_of(tables: Mapping[str, Any], known_models: Collection[str] | None) -> dict[bytes, ApiKey]:
    keys: dict[bytes, ApiKey] = {}
    for name, value in tables.items():
        if not NAME.fullmatch(name):
            raise ValueError("names of keys are 1 to 64 letters, digits, - and _")
        try:
            table = msgspec.convert(value, _Table)
        except msgspec.ValidationError as error:
            raise ValueError(f"[{name}] {error}") from None
        if (table.key is None) == (table.sha256 is None):
            raise ValueError(f"[{name}] needs either key or sha256")
        digest = bytes.fromhex(table.sha256 or "") if table.key is None else digest_of(table.key)
        if digest in keys:
            raise ValueError(f"[{keys[digest].name}] and [{name}] have the same key")
        if known_models is not None and not (table.models or frozenset()).issubset(known_models):
            raise ValueError(f"[{name}] names a model that is not served; served models: {', '.join(known_models)}")
        keys[digest] = ApiKey(name=name, **{field: getattr(table, field) for field in _Permissions.__struct_fields__})
    return keys

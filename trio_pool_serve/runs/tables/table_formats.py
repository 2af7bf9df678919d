"""The formats of files with tables, by their extensions."""

from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias, get_args

from attrs import frozen

from trio_pool_serve.errors import BulkInputError, install_extra

Kind: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet", "arrow"]
Compression: TypeAlias = Literal["", "gz", "zst"]

KNOWN = ".jsonl, .ndjson, .csv and .tsv (each also with .gz or .zst), .parquet, .arrow and .feather"


@frozen
class Format:
    """A kind of file, and how all of it is compressed: Parquet and Arrow are compressed inside, if at all."""

    kind: Kind
    compression: Compression = ""

    @property
    def in_lines(self) -> bool:
        """Whether the file is text, and its rows are lines."""
        return self.kind in {"jsonl", "csv", "tsv"}

    def __str__(self) -> str:
        """Return the usual extension of files: ``jsonl.gz``."""
        return f"{self.kind}.{self.compression}" if self.compression else self.kind


KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)} | {"ndjson": "jsonl", "feather": "arrow"}
COMPRESSIONS: dict[str, Compression] = {"gz": "gz", "zst": "zst"}

FORMATS = {name: Format(kind) for name, kind in KINDS.items()} | {
    f"{name}.{compression}": Format(kind, compression)
    for name, kind in KINDS.items()
    for compression in COMPRESSIONS.values()
    if Format(kind).in_lines
}
"""The formats by file extension, such as ``jsonl.gz``."""


def format_of(source: str | Path, given: str | None = None) -> Format:
    """Return the format ``given`` (``csv``, ``jsonl.zst``); without it, the extension decides.

    Without a compression in ``given``, the extension's is used: ``texts.txt.gz`` as ``jsonl`` is compressed with gzip.
    Raises ``BulkInputError``, with the known formats.
    """
    name = PurePath(source).name
    found = known_format(name if given is None else f".{given}")
    if found is None:
        of_extension = f"{source}: unknown file extension; known: {KNOWN}. Or set --input-format or --output-format."
        of_name = f"Unknown format `{given}`; accepted: {KNOWN}, without the first dot."
        raise BulkInputError(of_extension if given is None else of_name)
    if given is not None and found.in_lines and not found.compression:
        return Format(found.kind, COMPRESSIONS.get(name.lower().rpartition(".")[2], ""))
    return found


def known_format(name: str) -> Format | None:
    """Return the format of a file name's extension, or None."""
    parts = name.lower().split(".")
    for n in (2, 1):
        if len(parts) > n and (found := FORMATS.get(".".join(parts[-n:]))):
            return found
    return None


def check_packages(read: Format, written: Format) -> None:
    """Raise ``BulkInputError`` if a package that these formats need is missing."""
    for each, doing, zst in ((read, "Reading", "pyarrow"), (written, "Writing", "zstandard")):
        if each.compression == "zst":
            import_extra(zst, f"{doing} .zst files")
        if not each.in_lines:
            import_extra("pyarrow", f"{doing} Parquet and Arrow files")


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of pyarrow or zstandard. Raises ``BulkInputError`` with the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise BulkInputError(f"{purpose} requires more packages. {install_extra('bulk')}") from error

"""What a table's files had in them when they were scanned."""

from attrs import frozen


@frozen
class FilePrint:
    """A file: its name below the source, its size, the BLAKE2b digest of its bytes, and when it was changed."""

    name: str
    n_bytes: int
    blake2b: str
    mtime_ns: int


@frozen
class Fingerprint:
    """All files of a table, and how many rows they have, or None if that is not known.

    Standard input has no files here: it cannot be read twice, so nothing can be said of it. msgspec encodes and decodes
    fingerprints.
    """

    files: tuple[FilePrint, ...] = ()
    rows: int | None = None

    def changes(self, other: "Fingerprint") -> str:
        """Return how another, later fingerprint differs, as sentences; "" for the same content under the same names."""
        before = {file.name: file for file in self.files}
        after = {file.name: file for file in other.files}
        sentences = [f"{name} is gone." for name in before if name not in after]
        sentences += [f"{name} is new." for name in after if name not in before]
        sentences += [_change(before[name], after[name]) for name in before if name in after]
        return " ".join(filter(None, sentences))


def _change(before: FilePrint, after: FilePrint) -> str:
    if before.n_bytes != after.n_bytes:
        return f"{before.name} has {after.n_bytes} bytes, where it had {before.n_bytes}."
    if before.blake2b != after.blake2b:
        return f"{before.name} has other content of the same length."
    return ""

"""How much of an output is committed."""

import msgspec
from attrs import frozen

from trio_pool_serve.errors import StorageError


@frozen(kw_only=True)
class Position:
    """What a resume starts from: everything behind it is removed.

    ``n_bytes`` is the length of a file of lines, or that of all parts together, of which there are ``parts``.
    """

    format: str
    rows: int = 0
    n_bytes: int = 0
    parts: int = 0
    finished: bool = False

    def encoded(self) -> bytes:
        """Return the position as JSON."""
        return msgspec.json.encode(self)


def decoded_position(position: bytes | None, new: Position) -> Position:
    """Return a position that ``encoded`` returned, or ``new``. Raises ``StorageError`` for one of another output."""
    if position is None:
        return new
    try:
        found = msgspec.json.decode(position, type=Position)
    except msgspec.DecodeError as error:
        raise StorageError(f"The position of the output cannot be read: {error}.") from error
    if found.format != new.format:
        raise StorageError(f"The output was begun as {found.format}, and is to go on as {new.format}.")
    return found

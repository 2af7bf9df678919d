"""How much of an output is committed."""

from typing import Self

import msgspec
from attrs import frozen


@frozen
class Position:
    """What a resume starts from: everything behind it is removed.

    ``n_bytes`` is the length of a file of lines, or that of all parts together, of which there are ``parts``.
    """

    n_bytes: int = 0
    parts: int = 0

    def encoded(self) -> bytes:
        """Return the position as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, position: bytes | None) -> Self:
        """Return a position that ``encoded`` returned; without one, the beginning."""
        return cls() if position is None else msgspec.json.decode(position, type=cls)

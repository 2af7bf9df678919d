"""A token of a text, for display."""

from attrs import frozen


@frozen
class Token:
    """A token and its position.

    ``text`` is the text it covers, ``piece`` its entry in the vocabulary. ``start`` and ``stop`` are character
    positions, ``None`` for special tokens and for tokenizers without positions.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    piece: str

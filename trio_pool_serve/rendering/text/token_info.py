"""One token of a text, for people to look at."""

from attrs import frozen


@frozen
class Token:
    """A token and where it comes from.

    ``text`` is what it stands for in the text, ``piece`` is how the vocabulary writes it. ``start`` and ``stop``
    are character positions; special tokens have none, nor have those of tokenizers that do not know them.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    piece: str

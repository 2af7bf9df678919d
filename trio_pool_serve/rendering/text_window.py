"""Tokenising no more of a text than will be kept.

A text of which only the first N tokens are wanted is cut before it is tokenised. The cut must not show:
the N tokens have to be those that the whole text would give. Tokenizers work word by word, so a cut
disturbs only the tokens beside it; the cut text is good when it yields N tokens and a margin. If it does
not (long runs of blanks, or words that collapse into one unknown token), the window grows.
"""

from attrs import frozen

from trio_pool_serve.rendering.tokenizer import Encoded, Tokenizer
from trio_pool_serve.types import TruncationSide

CHARACTERS_PER_TOKEN = 8
"""First guess of the window; English has four, few scripts have more than this."""

MARGIN_TOKENS = 32
"""Tokens beside the cut that may differ from the whole text's."""

GROWTH = 4


@frozen(eq=False)
class WindowedText:
    """The tokens of a text, or of as much of it as was needed; no special tokens."""

    encoded: Encoded
    is_whole: bool

    @property
    def tokens(self) -> int:
        """How many tokens are there; the whole text has more if ``is_whole`` is false."""
        return len(self.encoded)


def encode_window(tokenizer: Tokenizer, text: str, keep: int, side: TruncationSide) -> WindowedText:
    """Tokenise enough of ``text`` to know its ``keep`` tokens opposite of ``side``, where it is cut."""
    characters = (keep + MARGIN_TOKENS) * CHARACTERS_PER_TOKEN
    while characters < len(text):
        encoded = tokenizer.encode(text[:characters] if side == "right" else text[-characters:])
        if len(encoded) >= keep + MARGIN_TOKENS:
            return WindowedText(encoded, is_whole=False)
        characters *= GROWTH
    return WindowedText(tokenizer.encode(text), is_whole=True)

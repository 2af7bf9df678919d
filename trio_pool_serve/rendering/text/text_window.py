"""Tokenising no more of a text than will be kept.

A text of which only the first N tokens are wanted is cut before it is tokenised. The cut must not show:
the N tokens have to be those that the whole text would give. Tokenizers work word by word, so a cut
disturbs the tokens of the word it goes through and none beyond; inside a very long word (Chinese has no
blanks) byte-pair merges and unigram paths fall into step again after a few characters that differ. So
the cut text is good when it yields N tokens and a margin, and something at the cut brings the tokens
into step. If not (long runs of blanks, one letter a thousand times over, words that collapse into one
unknown token), the window grows.

Tokens that are not kept cost more than their time: cutting them off, and letting go of them, holds the interpreter
lock, 15 ms for a hundred thousand. Where the first guess would be large, a sample of the text makes it better.

It does not grow for ever, or ten megabytes of one letter would hold a thread for a minute: past a thousand
characters for each token that is kept, or past half a million and sixteen for each, the window is taken as it is.
"""

import re

from attrs import frozen

from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer

CHARACTERS_PER_TOKEN = 8
"""First guess of the window; English has four, few scripts have more than this."""

SAMPLE_CHARACTERS = 4096
MIN_SAMPLED_CHARACTERS = 16 * SAMPLE_CHARACTERS
"""Windows of fewer characters are not worth a look at a sample."""

SAMPLE_SLACK = 1.25
"""How much longer the window is than the sample says."""

MARGIN_TOKENS = 128
"""Tokens beside the cut that may differ from the whole text's. WordPiece has one unknown token for a word
of more than 100 characters, but up to 100 tokens for what a cut leaves of it."""

MAX_CHARACTERS_PER_TOKEN = 1024
"""Where the window stops to grow. Beyond it, only what a tokenizer makes next to nothing of is left out."""

MAX_CHARACTERS = 2**19
MANY_CHARACTERS_PER_TOKEN = 16
"""It stops earlier where many tokens are kept: one letter over and over takes 3 µs a letter to tokenise."""

GROWTH = 4

SETTLING_CHARACTERS = 32
"""Characters beside the cut that are looked at: at four bytes each, no more tokens than the margin has."""

SETTLING_ALPHABET = 11
"""Different characters among them that bring tokens into step without a blank. One more than the digits,
which some tokenizers group by threes, counted from the first of however many there are."""

WORD_BOUNDARY = re.compile(r"\s\S")


@frozen(eq=False)
class WindowedText:
    """The tokens of a text, or of as much of it as was looked at; no special tokens."""

    encoded: Encoded
    is_whole: bool

    @property
    def tokens(self) -> int:
        """How many tokens are there; if ``is_whole`` is false, the whole text has at least as many."""
        return len(self.encoded)


def encode_window(tokenizer: Tokenizer, text: str, keep: int, side: TruncationSide) -> WindowedText:
    """Tokenise enough of ``text`` to know its ``keep`` tokens opposite of ``side``, where it is cut."""
    needed = keep + MARGIN_TOKENS
    characters, most = needed * CHARACTERS_PER_TOKEN, max_characters_for(keep)
    if min(characters, len(text)) >= MIN_SAMPLED_CHARACTERS:
        sampled = len(tokenizer.encode(_beginning(text, SAMPLE_CHARACTERS, side)))
        characters = min(characters, int(SAMPLE_SLACK * needed * SAMPLE_CHARACTERS / max(1, sampled)))
    while characters < min(len(text), most):
        window = _beginning(text, characters, side)
        beside_cut = window[-SETTLING_CHARACTERS:] if side == "right" else window[:SETTLING_CHARACTERS]
        if _settles(beside_cut):
            encoded = tokenizer.encode(window)
            if len(encoded) >= needed:
                return WindowedText(encoded, is_whole=False)
        characters *= GROWTH
    if len(text) > most:
        return WindowedText(tokenizer.encode(_beginning(text, most, side)), is_whole=False)
    return WindowedText(tokenizer.encode(text), is_whole=True)


def max_characters_for(keep: int) -> int:
    """Return how much of a text is looked at, at most, for the sake of so many tokens."""
    needed = keep + MARGIN_TOKENS
    return min(needed * MAX_CHARACTERS_PER_TOKEN, max(MAX_CHARACTERS, needed * MANY_CHARACTERS_PER_TOKEN))


def _beginning(text: str, characters: int, side: TruncationSide) -> str:
    """Return so many characters opposite of ``side``."""
    return text[:characters] if side == "right" else text[-characters:]


def _settles(characters: str) -> bool:
    """Tell whether tokens do not depend on what is on the other side of these characters."""
    return bool(WORD_BOUNDARY.search(characters)) or len(set(characters)) >= SETTLING_ALPHABET

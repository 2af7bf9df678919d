"""Tokenises an excerpt of a text, hardly longer than the part that is kept when the input is truncated.

If only the first N tokens are kept, the text is cut before it is tokenised. The N tokens must equal the first N of the
whole text. Tokenizers work word by word, so a cut changes the tokens of the word it divides and no others; inside a
very long word (Chinese has no blanks) byte-pair merges and unigram paths agree again after a few different characters.
So an excerpt is accepted if it yields N tokens plus a margin and its end at the cut contains a word boundary or enough
different characters. Without these (one character repeated a thousand times) the tokens beyond the margin must stay the
same when the cut is moved by a few characters. If not (long runs of blanks, words that become one unknown token), the
excerpt grows.

Superfluous tokens cost more than tokenising them: truncating and freeing them holds the interpreter lock, 15 ms for a
hundred thousand. If the first estimate would be large, tokenising a sample of the text improves it.

The excerpt's growth is bounded, or ten megabytes of one letter would occupy a thread for a minute: at a thousand
characters per kept token, or at 262,144 characters and 16 per kept token, the excerpt is used without the check.
"""

import re

import numpy as np
from attrs import frozen

from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.tokenizer import Encoded, Tokenizer

CHARACTERS_PER_TOKEN = 8
"""First estimate of the excerpt; English has four, few scripts have more than this."""

SAMPLE_CHARACTERS = 4096
MIN_SAMPLED_CHARACTERS = 16 * SAMPLE_CHARACTERS
"""Below this, tokenising a sample costs more than it saves."""

SAMPLE_SLACK = 1.25
"""Factor by which the excerpt exceeds the length estimated from the sample."""

MARGIN_TOKENS = 128
"""Tokens next to the cut that can differ from the whole text's. WordPiece has one unknown token for a word of more
than 100 characters, but up to 100 tokens for the part before a cut."""

MAX_CHARACTERS_PER_TOKEN = 1024
"""Bound of the excerpt. Past it, only text that yields almost no tokens is left out."""

MAX_CHARACTERS = 2**18
MANY_CHARACTERS_PER_TOKEN = 16
"""A tighter bound where many tokens are kept: one repeated letter takes up to 3 µs per letter to tokenise."""

GROWTH = 4

SETTLING_CHARACTERS = 32
"""Characters next to the cut that are checked: at four bytes each, at most as many tokens as the margin."""

SETTLING_ALPHABET = 11
"""Different characters among them after which tokens no longer depend on the cut, without a blank. One more than the
digits, which some tokenizers group by threes from the first digit of a number."""

SHIFTS = (1, 2, 3, 5, 8, 13)
"""Characters by which the cut is moved: byte-pair merges of a repeated piece, which count from the cut to the right,
change. Ten megabytes of full stops, where nothing changes, take WordPiece 0.02 s instead of 0.6 s."""

WORD_BOUNDARY = re.compile(r"\s\S")


@frozen(eq=False)
class Excerpt:
    """The tokens of a part of a text, or of all of it, without special tokens."""

    encoded: Encoded
    is_whole: bool
    begin: int = 0
    """Number of characters in front of the part."""

    @property
    def tokens(self) -> int:
        """Number of tokens; unless ``is_whole``, the whole text has at least as many."""
        return len(self.encoded)

    def fits(self, keep: int) -> bool:
        """Whether the whole text has at most ``keep`` tokens."""
        return self.is_whole and len(self.encoded) <= keep


def encode_excerpt(
    tokenizer: Tokenizer, text: str, keep: int, side: TruncationSide, *, positions: bool = False
) -> Excerpt:
    """Tokenise enough of ``text`` for the ``keep`` tokens that remain after truncating at ``side``."""
    needed = keep + MARGIN_TOKENS
    characters = needed * CHARACTERS_PER_TOKEN
    most = min(needed * MAX_CHARACTERS_PER_TOKEN, max(MAX_CHARACTERS, needed * MANY_CHARACTERS_PER_TOKEN))

    def encode(characters: int) -> Excerpt:
        part = _cut(text, characters, side)
        begin = len(text) - len(part) if side == "left" else 0
        return Excerpt(tokenizer.encode(part, positions=positions), len(part) == len(text), begin)

    if min(characters, len(text)) >= MIN_SAMPLED_CHARACTERS:
        sampled = len(tokenizer.encode(_cut(text, SAMPLE_CHARACTERS, side)))
        characters = min(characters, int(SAMPLE_SLACK * needed * SAMPLE_CHARACTERS / max(1, sampled)))
    while characters < min(len(text), most):
        at_cut = _cut(_cut(text, characters, side), SAMPLE_CHARACTERS, "left" if side == "right" else "right")
        if _settles(at_cut, side) or _ignores_cut(tokenizer, at_cut, side):
            excerpt = encode(characters)
            if excerpt.tokens >= needed:
                return excerpt
        characters *= GROWTH
    return encode(most)


def shorten(tokenizer: Tokenizer, text: str, tokens: int | None) -> str:
    """Return a text truncated to its first ``tokens`` tokens, ``None`` for all of it."""
    if tokens is None:
        return text
    excerpt = encode_excerpt(tokenizer, text, tokens, "right", positions=True)
    return text if excerpt.tokens <= tokens else tokenizer.beginning(text, excerpt.encoded, tokens)


def _cut(text: str, characters: int, side: TruncationSide) -> str:
    """Return the ``characters`` that remain after cutting at ``side``."""
    return text[:characters] if side == "right" else text[-characters:]


def _settles(at_cut: str, side: TruncationSide) -> bool:
    """Whether tokens on one side of the characters next to the cut are independent of the text on the other side."""
    characters = at_cut[-SETTLING_CHARACTERS:] if side == "right" else at_cut[:SETTLING_CHARACTERS]
    return bool(WORD_BOUNDARY.search(characters)) or len(set(characters)) >= SETTLING_ALPHABET


def _ignores_cut(tokenizer: Tokenizer, at_cut: str, side: TruncationSide) -> bool:
    """Whether tokens beyond the margin stay the same when the cut is moved."""
    encoded = tokenizer.encode(at_cut)
    keep = len(encoded) - MARGIN_TOKENS
    if keep < MARGIN_TOKENS:
        return False
    ids = tokenizer.finish(encoded, keep, side, add_special_tokens=False)
    moved = (tokenizer.encode(_cut(at_cut, len(at_cut) - shift, side)) for shift in SHIFTS)
    return all(np.array_equal(ids, tokenizer.finish(each, keep, side, add_special_tokens=False)) for each in moved)

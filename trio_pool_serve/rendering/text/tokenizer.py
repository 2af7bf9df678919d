"""One tokenizer, for one thread at a time.

Both kinds split tokenising in two: ``encode`` without special tokens, then ``finish``, which cuts and
adds them. Truncation is a slice of our own, so that a fast tokenizer's truncation state is never
touched: changing it while another thread encodes is what raises "Already borrowed".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from attrs import Factory, frozen

from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.token_info import Token
from trio_pool_serve.types import TokenIds

Encoded: TypeAlias = Any
"""What ``encode`` made for ``finish``: it has a length, in tokens."""


RenderChat: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""(messages, options) → the text that the chat template makes of them; raises whatever the template does."""


@frozen(kw_only=True)
class ModelChatTemplates:
    """What a model's files say about conversations.

    ``templates`` are in Jinja, by name, the one of most models ``default``; none where the model reads no
    conversations. ``special_tokens`` are what templates may write, by name, such as ``bos_token``.
    """

    templates: Mapping[str, str] = Factory(dict)
    special_tokens: Mapping[str, str] = Factory(dict)


class Tokenizer(Protocol):
    """Texts to token ids."""

    @property
    def special_tokens(self) -> int:
        """How many special tokens surround one text."""

    @property
    def pair_special_tokens(self) -> int:
        """How many special tokens surround two texts."""

    @property
    def render_chat(self) -> RenderChat | None:
        """The chat template, ``None`` if there is none."""

    @property
    def chat(self) -> ModelChatTemplates:
        """The chat templates as texts."""

    def encode(self, text: str) -> Encoded:
        """Tokenise without special tokens."""

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Keep at most ``keep`` tokens, cutting at ``side``, and add the special tokens to them."""

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Take ``encoded`` apart into windows of ``size`` tokens; put ``prefix`` and special tokens around each."""

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens, for people to look at."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Keep at most ``keep`` tokens, cutting at ``side``; ``encoded`` is used up."""

    def longest_first(self, first: int, second: int, keep: int) -> tuple[int, int]:
        """Return how many tokens of each text are kept when both may have ``keep`` together.

        A text that fills less than half stays whole, else each gets half. The odd token is the tokenizer's choice.
        """

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts; the second value is their segments, ``None`` where all are 0."""

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Return the part of ``text`` that its first tokens come from; it has more than that many."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is one of the special tokens."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, ``None`` if there is no such token."""

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name, such as ``mask_token``; ``None`` if there is none."""

    def copy(self) -> "Tokenizer":
        """Return one that longest_first_lengths no state with this."""


def longest_first_lengths(first: int, second: int, keep: int, *, odd_to_first: bool) -> tuple[int, int]:
    """Return how many tokens of two texts are kept of ``keep`` together, the longest cut first."""
    if first + second <= keep:
        return first, second
    if 2 * min(first, second) <= keep:
        return (first, keep - first) if first <= second else (keep - second, second)
    of_first = (keep + odd_to_first) // 2
    return of_first, keep - of_first


def segments(type_ids: Sequence[int]) -> TokenIds | None:
    """Return the segments of a pair, int32, shape (tokens,); ``None`` where all are 0."""
    return np.array(type_ids, dtype=np.int32) if any(type_ids) else None

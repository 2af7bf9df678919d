"""Tokenizers of the ``tokenizers`` library, which most models use."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import tokenizers
from attrs import Factory, define, field

from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.tokenizer import Encoded, Positions, Token, Tokenizer
from trio_pool_serve.rendering.text.word_ids import WordIds, tokenizes_by_words
from trio_pool_serve.types import TokenIds


@define(eq=False)
class FastTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library.

    Any number of threads may use it at a time, without copies: nothing here changes the library's, whose caches have
    locks. Another one would hold the interpreter lock while it is made, 45 ms for a vocabulary of 30,000 tokens.
    """

    _backend: tokenizers.Tokenizer
    _special_ids: frozenset[int]
    _named_ids: Mapping[str, int] = Factory(dict)
    _words: WordIds | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        # tokenizer.json can contain truncation and padding settings from when it was saved.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._backend.num_special_tokens_to_add(is_pair=False)
        self.pair_special_tokens = self._backend.num_special_tokens_to_add(is_pair=True)
        self._words = WordIds(self.encode_all) if tokenizes_by_words(self._backend) else None
        self.has_short_ids = self._words is not None

    def encode(self, text: str, *, positions: bool = False) -> Encoded:
        """Tokenise without special tokens.

        As a batch of one: ``encode_batch`` releases the interpreter lock, the library's ``encode`` holds it for a time
        proportional to the text. Positions take a fifth more. Raises ``UnicodeError`` for half of a surrogate pair,
        which JSON can contain.
        """
        return _encoded([text], self._backend.encode_batch)[0] if positions else self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Tokenise several texts, all without the interpreter lock."""
        return _encoded(texts, self._backend.encode_batch_fast)

    def short_ids(self, text: str, *, add_special_tokens: bool) -> TokenIds | None:
        """Return the ids of a text whose words were seen before, or are short.

        4 instead of 43 µs for 34 tokens; twice as long as the library takes if all words are new.
        """
        if self._words is None or (ids := self._words.ids_of(text)) is None:
            return None
        before, after = self._around_text if add_special_tokens else ([], [])
        return np.array(before + ids + after, dtype=np.int32)

    @cached_property
    def _around_text(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        framed = self._backend.post_process(self.encode("0"))
        special = framed.special_tokens_mask
        first, last = special.index(0), len(special) - special[::-1].index(0)
        return framed.ids[:first], framed.ids[last:]

    def finish(self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool) -> TokenIds:
        """Truncate and add special tokens."""
        encoded = self.truncate(encoded, keep, side)
        framed = self._backend.post_process(encoded) if add_special_tokens else encoded
        return np.array(framed.ids, dtype=np.int32)

    def finish_with_positions(
        self, encoded: Encoded, keep: int, side: TruncationSide, *, add_special_tokens: bool
    ) -> tuple[TokenIds, Positions]:
        """Truncate and add special tokens; return also where each token begins and ends in the text."""
        encoded = self.truncate(encoded, keep, side)
        # Read before special tokens are added: doing that takes the blanks out of a token's positions a second time.
        of_text = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        framed = self._backend.post_process(encoded) if add_special_tokens else encoded
        positions = np.full((len(framed), 2), -1, dtype=np.int64)
        positions[np.array(framed.special_tokens_mask, dtype=np.int64) == 0] = of_text
        return np.array(framed.ids, dtype=np.int32), positions

    def finish_windows(
        self, encoded: Encoded, size: int, *, prefix: Encoded, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Split into windows and add a prefix and special tokens to each.

        Works on ids: splitting an ``Encoding`` holds the interpreter lock for a time proportional to the whole text.
        """
        before, after = self._around_text if add_special_tokens else ([], [])
        ids, before = encoded.ids, before + prefix.ids
        return [
            np.array(before + ids[begin : begin + size] + after, dtype=np.int32)
            for begin in range(0, max(1, len(ids)), size)
        ]

    def tokens(self, text: str, *, add_special_tokens: bool) -> list[Token]:
        """Return a text's tokens."""
        encoded = self.encode(text, positions=True)
        framed = self._backend.post_process(encoded) if add_special_tokens else encoded
        rows = zip(framed.ids, framed.tokens, framed.special_tokens_mask, framed.offsets, strict=True)
        return [
            Token(id_, piece, True, None, None, piece)  # noqa: FBT003  (a record of six)
            if special
            else Token(id_, text[start:stop], False, start, stop, piece)  # noqa: FBT003
            for id_, piece, special, (start, stop) in rows
        ]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries; empty for ids that only the model's embeddings have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. As a batch of one, as in ``encode``."""
        return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def truncate(self, encoded: Encoded, keep: int, side: TruncationSide) -> Encoded:
        """Truncate in place."""
        if len(encoded) > keep:
            encoded.truncate(keep, direction=side)
        return encoded

    def join(self, first: Encoded, second: Encoded, *, add_special_tokens: bool) -> tuple[TokenIds, TokenIds | None]:
        """Join two texts as the library's post-processor does."""
        joined = self._backend.post_process(first, second, add_special_tokens=add_special_tokens)
        return self._pair(joined.ids, joined.type_ids)

    def beginning(self, text: str, encoded: Encoded, tokens: int) -> str:
        """Return the text up to the last character of the last of the tokens."""
        return text[: encoded.offsets[tokens - 1][1]]

    def is_special(self, token_id: int) -> bool:
        """Whether an id is one of the special tokens."""
        return token_id in self._special_ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._backend.token_to_id(token)

    def id_named(self, name: str) -> int | None:
        """Return the id of the special token of a name."""
        return self._named_ids.get(name)


def _encoded(texts: Sequence[str], encode: Callable[..., Sequence[Encoded]]) -> Sequence[Encoded]:
    try:
        return encode(list(texts), add_special_tokens=False)
    except TypeError as error:  # all that the library raises for a str
        raise UnicodeError("the text holds a lone surrogate") from error


def end_texts(backend: tokenizers.Tokenizer, token: str) -> None:
    """Make ``backend``, whose vocabulary has ``token``, end every text with it, unless it does."""
    index, own = backend.token_to_id(token), backend.post_processor
    if backend.encode("").ids[-1:] != [index]:
        end = tokenizers.processors.TemplateProcessing(single=f"$A {token}", special_tokens=[(token, index)])
        backend.post_processor = end if own is None else tokenizers.processors.Sequence([own, end])

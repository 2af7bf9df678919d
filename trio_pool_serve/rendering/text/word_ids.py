"""The token ids of words that earlier texts had: most short texts have no others."""

from collections.abc import Callable, Sequence

import tokenizers
from attrs import define, field

from trio_pool_serve.rendering.text.tokenizer import Encoded

MAX_CHARACTERS = 32
"""Maximum length of a word that is kept."""

MAX_WORDS = 2**14
"""Maximum number of words that are kept, with more, all are forgotten. They take some 5 MB, up to 23 if each has
32 tokens."""


def tokenizes_by_words(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the words of a text can be tokenised one by one, as with BERT's rules.

    These rules change one character at a time, and a space ends a word. An added token with white space could match
    across two words, so there may be none.
    """
    rules = (
        (backend.normalizer, tokenizers.normalizers.BertNormalizer),
        (backend.pre_tokenizer, tokenizers.pre_tokenizers.BertPreTokenizer),
        (backend.model, tokenizers.models.WordPiece),
    )
    added = backend.get_added_tokens_decoder().values()
    has_space = any(map(str.isspace, "".join([token.content for token in added])))
    return all(isinstance(part, kind) for part, kind in rules) and not has_space


@define(eq=False)
class WordIds:
    """Remembers the ids of words, which ``encode`` tokenises without special tokens. Any thread may use it."""

    encode: Callable[[Sequence[str]], Sequence[Encoded]]
    _known: dict[str, list[int]] = field(init=False, factory=dict)

    def ids_of(self, text: str) -> list[int] | None:
        """Return the ids of a text; ``None`` if it has a new word of more than ``MAX_CHARACTERS``."""
        words = text.split(" ")
        try:
            known = self._known
            return [token_id for word in words for token_id in known[word]]
        except KeyError:
            unknown = [word for word in dict.fromkeys(words) if word not in known]
        if max(map(len, unknown), default=0) > MAX_CHARACTERS:
            return None
        if len(known) + len(unknown) > MAX_WORDS:
            known, unknown = {}, [*dict.fromkeys(words)]
        known.update(zip(unknown, [each.ids for each in self.encode(unknown)], strict=True))
        self._known = known
        return [token_id for word in words for token_id in known[word]]

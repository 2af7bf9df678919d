"""How a kind of model renders a text, and two texts together.

Most models join two texts as their tokenizer does, ``[CLS] first [SEP] second [SEP]``; language models use a template
(``rendering/chat/chat_pair.py``). ``ModelKind.pair_format`` chooses the format of a kind.
"""

from collections.abc import Mapping

import numpy as np
from attrs import Factory, evolve, frozen

from trio_pool_serve.prompts import InputType, PairPrompt, RenderingParams, TruncationSide
from trio_pool_serve.rendering.text.excerpt import Excerpt, encode_excerpt
from trio_pool_serve.rendering.text.long_text import available_tokens, too_long
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """The format of most models: no prefix, and the model's maximum length for every input type.

    Texts of the ``lookup_input_types`` have no special tokens, so they can be empty.
    """

    prefix: str = ""
    """Text in front of every input and its instruction."""
    limits: Mapping[InputType | None, int] = Factory(dict)
    """Maximum tokens of a text by input type, special tokens included, if less than the model's maximum."""
    added_tokens: int = 0
    """Number of tokens that ``finish`` adds to every text."""
    lookup_input_types: frozenset[InputType | None] = frozenset()
    """Input types whose texts are looked up in a table, not computed by a transformer."""

    def limited(self, params: RenderingParams, max_model_len: int) -> tuple[RenderingParams, int]:
        """Return the params with the truncation that this format requires, and the maximum number of tokens.

        Texts longer than the limit of their input type are truncated, not rejected.
        """
        most = min(self.limits.get(params.input_type, max_model_len), max_model_len) - self.added_tokens
        if params.truncate_to is None and most < max_model_len:
            params = evolve(params, truncate_to=most)
        return params, most

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Whether texts of this input type have special tokens at all."""
        return input_type not in self.lookup_input_types

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Return the model input; ``token_ids`` already include special tokens.

        An empty text to look up becomes one token that is not attended to: a row of a batch has at least one token.
        """
        if len(token_ids) == 0 and input_type in self.lookup_input_types:
            return RenderedPrompt(np.zeros(1, dtype=np.int32), attended=0)
        return RenderedPrompt(token_ids)


class PairFormat:
    """How a kind of model joins two texts: both, truncated longest first, with the special tokens of a pair.

    Kinds that join texts in another way have a subclass.
    """

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the token ids, with their segments if the model uses any.

        Raises ``ContextLengthError``, ``InvalidRequestError`` or ``UnicodeError``.
        """
        special = tokenizer.pair_special_tokens if params.add_special_tokens else 0
        keep, side = available_tokens(params, max_model_len, special), params.truncation_side
        if params.instruction:
            first_text = params.instruction + shorten(tokenizer, prompt.first, prompt.max_first_tokens)
            first = _encode(tokenizer, first_text, None, keep, side)
        else:
            first = _encode(tokenizer, prompt.first, prompt.max_first_tokens, keep, side)
        second = _encode(tokenizer, prompt.second, prompt.max_second_tokens, keep, side)
        length = first.tokens + second.tokens
        exact = first.is_whole and second.is_whole
        if params.truncate_to is None and not (exact and length <= keep):
            raise too_long(f"{length + special}" if exact else f"more than {length + special}", max_model_len)
        lengths = first.tokens, second.tokens
        if not (first.is_whole or second.is_whole):
            # Which text is longer decides where the odd token goes; their characters are compared.
            longer = len(prompt.first) > len(prompt.second)
            lengths = keep + longer, keep + (not longer)
        for_first, for_second = longest_first(tokenizer, *lengths, keep)
        token_ids, type_ids = tokenizer.join(
            tokenizer.truncate(first.encoded, for_first, side),
            tokenizer.truncate(second.encoded, for_second, side),
            add_special_tokens=params.add_special_tokens,
        )
        return RenderedPrompt(token_ids, type_ids=type_ids)


def shorten(tokenizer: Tokenizer, text: str, tokens: int | None) -> str:
    """Return a text truncated to its first ``tokens`` tokens, ``None`` for all of it."""
    if tokens is None:
        return text
    excerpt = encode_excerpt(tokenizer, text, tokens, "right", positions=True)
    if excerpt.tokens <= tokens:
        return text
    return tokenizer.beginning(text, excerpt.encoded, tokens)


def _encode(tokenizer: Tokenizer, text: str, at_most: int | None, keep: int, side: TruncationSide) -> Excerpt:
    """Tokenise enough of the first ``at_most`` tokens for the ``keep`` that remain after truncating at ``side``."""
    if at_most is None:
        return encode_excerpt(tokenizer, text, keep, side)
    excerpt = encode_excerpt(tokenizer, text, min(at_most, keep + 1) if side == "right" else at_most, "right")
    if excerpt.tokens <= at_most:
        return excerpt
    return Excerpt(tokenizer.truncate(excerpt.encoded, at_most, "right"), is_whole=True)


def longest_first(tokenizer: Tokenizer, first: int, second: int, keep: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, ``keep`` in total.

    A text that needs less than half stays whole, else each gets half. The tokenizer decides who gets the odd token.
    """
    if first + second <= keep:
        return first, second
    if 2 * min(first, second) <= keep:
        return (first, keep - first) if first <= second else (keep - second, second)
    of_first = (keep + (tokenizer.odd_to_first or first > second)) // 2
    return of_first, keep - of_first

"""How a kind of model renders two texts together.

Most models join two texts as their tokenizer does, ``[CLS] first [SEP] second [SEP]``; language models use a template
(``rendering/chat/chat_pair.py``). ``ModelKind.pair_format`` chooses the format of a kind.
"""

from trio_pool_serve.prompts import PairPrompt, RenderingParams, TruncationSide
from trio_pool_serve.rendering.text.excerpt import Excerpt, encode_excerpt, shorten
from trio_pool_serve.rendering.text.long_text import available_tokens, too_long
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt


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

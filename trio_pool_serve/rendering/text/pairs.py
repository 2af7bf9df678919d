"""Pair formats: how two texts become one model input.

Most models join them as their tokenizer does, ``[CLS] first [SEP] second [SEP]``; language models use a template.
"""

from typing import Protocol

from attrs import frozen

from trio_pool_serve.prompts import PairPrompt, RenderingParams, TruncationSide
from trio_pool_serve.rendering.text.text_window import WindowedText, available_tokens, encode_window, too_long
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, longest_first
from trio_pool_serve.types import RenderedPrompt


class PairFormat(Protocol):
    """How a kind of model joins two texts."""

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the model input. Raises ``ContextLengthError``, ``InvalidRequestError`` or ``UnicodeError``."""


@frozen
class JoinedPair:
    """Both texts, truncated longest first, with the special tokens of a pair."""

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the token ids, with their segments if the model uses any."""
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
    window = encode_window(tokenizer, text, tokens, "right", positions=True)
    if window.tokens <= tokens:
        return text
    return tokenizer.beginning(text, window.encoded, tokens)


def _encode(tokenizer: Tokenizer, text: str, at_most: int | None, keep: int, side: TruncationSide) -> WindowedText:
    """Tokenise enough of the first ``at_most`` tokens for the ``keep`` that remain after truncating at ``side``."""
    if at_most is None:
        return encode_window(tokenizer, text, keep, side)
    window = encode_window(tokenizer, text, min(at_most, keep + 1) if side == "right" else at_most, "right")
    if window.tokens <= at_most:
        return window
    return WindowedText(tokenizer.truncate(window.encoded, at_most, "right"), is_whole=True)

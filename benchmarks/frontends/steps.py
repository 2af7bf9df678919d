"""The steps from a text to the model's input, one at a time. All of them block."""

from collections.abc import Sequence

from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.length_limit import available_tokens, too_long
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Encoded
from trio_pool_serve.types import RenderedPrompt, TokenIds

LONG = 16 * 1024
"""Characters past which our renderer looks at a window of a text only."""


def has_steps(texts: TextRenderer, prompt: TextPrompt | PairPrompt, params: RenderingParams) -> bool:
    """Return whether a prompt is a short text without any formatting; others are rendered by our renderer."""
    return (
        isinstance(prompt, TextPrompt)
        and 0 < len(prompt.text) <= LONG
        and type(texts.text_format) is TextFormat
        and texts.text_format == TextFormat()
        and not params.instruction
        and params.max_text_tokens is None
    )


def encode(texts: TextRenderer, batch: Sequence[str]) -> list[Encoded]:
    """Tokenise texts together. Raises ``TypeError`` for one that is not valid Unicode."""
    with texts.tokenizers.lend() as tokenizer:
        if not isinstance(tokenizer, FastTokenizer):
            return [tokenizer.encode(text) for text in batch]
        return tokenizer._backend.encode_batch(list(batch), add_special_tokens=False)  # noqa: SLF001  (ours has no use for it)


def finish(texts: TextRenderer, encoded: Encoded, params: RenderingParams) -> TokenIds:
    """Cut a text and add special tokens. Raises ``ContextLengthError`` or ``InvalidRequestError``."""
    with texts.tokenizers.lend() as tokenizer:
        special = tokenizer.special_tokens if params.add_special_tokens else 0
        keep = available_tokens(params, texts.max_model_len, special)
        if params.truncate_to is None and len(encoded) > keep:
            raise too_long(f"{len(encoded) + special}", texts.max_model_len)
        return tokenizer.finish(encoded, keep, params.truncation_side, add_special_tokens=params.add_special_tokens)


def format_ids(texts: TextRenderer, token_ids: TokenIds, params: RenderingParams) -> RenderedPrompt:
    """Return what the model reads."""
    return texts.text_format.finish(token_ids, params.input_type)

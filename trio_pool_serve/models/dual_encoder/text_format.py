"""Texts padded to a fixed length, as SigLIP's text tower was trained."""

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, TextFilling
from trio_pool_serve.prompts import Role
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class FilledFormat(TextFormat):
    """Every text is filled up with ``pad_id``."""

    filling: TextFilling
    pad_id: int

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Fill up a text."""
        del role
        tokens = len(token_ids)
        filled = np.full(max(self.filling.length, tokens), self.pad_id, dtype=np.int32)
        start = len(filled) - tokens if self.filling.on_the_left else 0
        filled[start : start + tokens] = token_ids
        return RenderedPrompt(filled, instruction_tokens, attended=None if self.filling.attends else tokens)


def dual_encoder_text_format(spec: DualEncoder, tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    if spec.filling is None:
        return TextFormat()
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no token that texts could be filled up with.")
    return FilledFormat(filling=spec.filling, pad_id=pad_id)

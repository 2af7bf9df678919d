"""Dual encoders: texts and images in one vector space."""

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder.image_format import tower_image_format
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, TextPadding, read_dual_encoder
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class PaddedFormat(TextFormat):
    """Every text is padded with ``pad_id``."""

    padding: TextPadding
    pad_id: int

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Pad a text."""
        del input_type
        tokens = len(token_ids)
        padded = np.full(max(self.padding.length, tokens), self.pad_id, dtype=np.int32)
        start = len(padded) - tokens if self.padding.pad_left else 0
        padded[start : start + tokens] = token_ids
        attended = None if self.padding.attends_to_padding else tokens
        return RenderedPrompt(padded, attended=attended)


def dual_encoder_text_format(spec: DualEncoder, tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    if spec.padding is None:
        return TextFormat()
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token.")
    return PaddedFormat(padding=spec.padding, pad_id=pad_id)


DUAL_ENCODER = ModelKind(
    read=read_dual_encoder,
    load="trio_pool_serve.models.dual_encoder.loading:load_dual_encoder",
    text_format=dual_encoder_text_format,
    image_format=tower_image_format,
)

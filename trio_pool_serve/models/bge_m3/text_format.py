"""Texts as BGE-M3 reads them: the first token has no vector of its own."""

import numpy as np
from attrs import frozen

from trio_pool_serve.models.bge_m3.spec import BgeM3
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class SkipFirstToken(TextFormat):
    """A first token ``token_id``, whose vector is the whole text's, has none of its own."""

    token_id: int | None

    def finish(
        self, token_ids: TokenIds, input_type: InputType | None, *, instruction_tokens: int = 0
    ) -> RenderedPrompt:
        """Leave out the first token."""
        del input_type
        kept = None
        if len(token_ids) and token_ids[0] == self.token_id:
            kept = np.arange(len(token_ids)) > 0
        return RenderedPrompt(token_ids, instruction_tokens, kept=kept)


def bge_m3_text_format(spec: BgeM3, tokenizer: Tokenizer) -> SkipFirstToken:
    """Return the text format of a model."""
    del spec
    return SkipFirstToken(token_id=tokenizer.id_named("cls_token"))

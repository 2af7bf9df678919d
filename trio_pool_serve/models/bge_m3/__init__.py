"""BGE-M3: dense, sparse and token vectors from one forward pass."""

import numpy as np
from attrs import frozen

from trio_pool_serve.models.bge_m3.spec import read_bge_m3
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.formats import TextFormat
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class SkipFirstToken(TextFormat):
    """A first token ``token_id`` is not kept: its vector is the dense vector of the whole text."""

    token_id: int | None

    def finish(self, token_ids: TokenIds, _: InputType | None) -> RenderedPrompt:
        """Mark all tokens but the first as kept."""
        is_first = len(token_ids) > 0 and token_ids[0] == self.token_id
        return RenderedPrompt(token_ids, kept=np.arange(len(token_ids)) > 0 if is_first else None)


BGE_M3 = ModelKind(
    read=read_bge_m3,
    load="trio_pool_serve.models.bge_m3.loading:load_bge_m3",
    text_format=lambda _, tokenizer: SkipFirstToken(token_id=tokenizer.id_named("cls_token")),
)

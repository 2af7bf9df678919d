"""Texts as page retrievers read them: every text is a query."""

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.late_interaction.text_format import TokensThatCount, tokens_that_count
from trio_pool_serve.models.page_retrieval.spec import AUGMENTATION, PageRetrieval
from trio_pool_serve.prompts import Role
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True, eq=False)
class QuestionFormat(TextFormat):
    """Every text is a question to page retrievers: its prefix and ``suffix`` (ids) are written by the format itself.

    ``counting`` is ``None`` where all tokens have a vector that counts.
    """

    suffix: TokenIds
    counting: TokensThatCount | None

    def most_tokens(self, role: Role | None, max_model_len: int) -> int:
        """Leave room for the suffix."""
        return super().most_tokens(role, max_model_len) - len(self.suffix)

    def adds_special_tokens(self, role: Role | None) -> bool:
        """Tell that the tokenizer adds none."""
        del role
        return False

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """End a question."""
        token_ids = np.concatenate([token_ids, self.suffix])
        kept = None if self.counting is None else self.counting.of(token_ids, role)
        return RenderedPrompt(token_ids, instruction_tokens, kept=None if kept is None or kept.all() else kept)


def question_format(spec: PageRetrieval, tokenizer: Tokenizer) -> QuestionFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token, which is to stand behind every question.")
    end = tokenizer.encode("\n")
    end_ids = tokenizer.finish(end, len(end), "right", add_special_tokens=False)
    return QuestionFormat(
        prefix=spec.text_prefix,
        suffix=np.concatenate([np.full(AUGMENTATION, pad_id, dtype=np.int32), end_ids]),
        counting=None if spec.mask is None else tokens_that_count(spec.mask, tokenizer),
    )

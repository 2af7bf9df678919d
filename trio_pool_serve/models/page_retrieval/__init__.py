"""Page retrievers: late interaction between a query and images of pages."""

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.late_interaction.spec import ScoringMask
from trio_pool_serve.models.late_interaction.text_format import KeptTokens, kept_tokens_of
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.page_retrieval.image_format import page_image_format
from trio_pool_serve.models.page_retrieval.spec import QUERY_AUGMENTATION_TOKENS, PageRetrieval, read_page_retrieval
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True, eq=False)
class PageQueryFormat(TextFormat):
    """Every text is a query: a prefix before it and ``suffix`` (token ids) after it, without special tokens."""

    suffix: TokenIds
    kept_tokens: KeptTokens

    def max_tokens_of(self, input_type: InputType | None, max_model_len: int) -> int:
        """Return the maximum without the suffix."""
        return super().max_tokens_of(input_type, max_model_len) - len(self.suffix)

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Return ``False``."""
        del input_type
        return False

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Append the suffix."""
        token_ids = np.concatenate([token_ids, self.suffix])
        return RenderedPrompt(token_ids, kept=self.kept_tokens.mask(token_ids, input_type))


def page_query_format(spec: PageRetrieval, tokenizer: Tokenizer) -> PageQueryFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token, which every query ends with.")
    end_ids = all_ids(tokenizer, tokenizer.encode("\n"))
    return PageQueryFormat(
        prefix=spec.text_prefix,
        suffix=np.concatenate([np.full(QUERY_AUGMENTATION_TOKENS, pad_id, dtype=np.int32), end_ids]),
        kept_tokens=kept_tokens_of(spec.mask or ScoringMask(), tokenizer),
    )


PAGE_RETRIEVAL = ModelKind(
    read=read_page_retrieval,
    load="trio_pool_serve.models.page_retrieval.loading:load_page_retrieval",
    text_format=page_query_format,
    image_format=page_image_format,
)

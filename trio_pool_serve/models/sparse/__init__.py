"""Learned sparse models: SPLADE, with and without inference for queries."""

import numpy as np
from attrs import frozen

from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.sparse.spec import Sparse, read_sparse
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.formats import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class LookupFormat(TextFormat):
    """Texts of the ``lookup_input_types`` have no special tokens, so they can be empty."""

    lookup_input_types: frozenset[InputType | None]

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Replace an empty row by one token that is not attended to: a row of a batch has at least one token."""
        if input_type in self.lookup_input_types and len(token_ids) == 0:
            return RenderedPrompt(np.zeros(1, dtype=np.int32), attended=0)
        return RenderedPrompt(token_ids)

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Return whether the text is computed by the transformer."""
        return input_type not in self.lookup_input_types


def sparse_text_format(spec: Sparse, _: Tokenizer) -> TextFormat:
    """Return a ``LookupFormat`` if some input type is looked up, else the default format."""
    if not spec.lookup_input_types:
        return TextFormat()
    length = spec.lookup_length
    return LookupFormat(
        limits=dict.fromkeys(spec.lookup_input_types, length) if length else {},
        lookup_input_types=spec.lookup_input_types,
    )


SPARSE = ModelKind(
    read=read_sparse,
    load="trio_pool_serve.models.sparse.loading:load_sparse",
    text_format=sparse_text_format,
)

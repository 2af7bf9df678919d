"""How a kind of model renders a text: a prefix, special tokens, and a limit by input type."""

from collections.abc import Mapping

import numpy as np
from attrs import Factory, evolve, frozen

from trio_pool_serve.prompts import InputType, RenderingParams
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """The format of most models: no prefix, and the model's maximum length for every input type.

    Texts of the ``lookup_input_types`` have no special tokens, so they can be empty.
    """

    prefix: str = ""
    """Text in front of every input and its instruction."""
    limits: Mapping[InputType | None, int] = Factory(dict)
    """Maximum tokens of a text by input type, special tokens included, if less than the model's maximum."""
    added_tokens: int = 0
    """Number of tokens that ``finish`` adds to every text."""
    lookup_input_types: frozenset[InputType | None] = frozenset()
    """Input types whose texts are looked up in a table, not computed by a transformer."""

    def limited(self, params: RenderingParams, max_model_len: int) -> tuple[RenderingParams, int]:
        """Return the params with the truncation that this format requires, and the maximum number of tokens.

        Texts longer than the limit of their input type are truncated, not rejected.
        """
        most = min(self.limits.get(params.input_type, max_model_len), max_model_len) - self.added_tokens
        if params.truncate_to is None and most < max_model_len:
            params = evolve(params, truncate_to=most)
        return params, most

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Whether texts of this input type have special tokens at all."""
        return input_type not in self.lookup_input_types

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Return the model input; ``token_ids`` already include special tokens.

        An empty text to look up becomes one token that is not attended to: a row of a batch has at least one token.
        """
        if len(token_ids) == 0 and input_type in self.lookup_input_types:
            return RenderedPrompt(np.zeros(1, dtype=np.int32), attended=0)
        return RenderedPrompt(token_ids)

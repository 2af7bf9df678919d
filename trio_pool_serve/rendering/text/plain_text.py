"""How a model reads a text, by input type: prefix, length limit, special tokens, and which tokens have a vector."""

from collections.abc import Mapping

from attrs import Factory, frozen

from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """The format of most models: no prefix, no limit but the model maximum, whatever the input type."""

    prefix: str = ""
    """What stands before every text, and before its instruction."""
    limits: Mapping[InputType | None, int] = Factory(dict)
    """Most tokens of a text in an input type, special tokens included, where that is not the model's limit."""

    def max_tokens_of(self, input_type: InputType | None, max_model_len: int) -> int:
        """Return the most tokens that a text in this input type may have."""
        return min(self.limits.get(input_type, max_model_len), max_model_len)

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Tell whether texts in this input type have special tokens at all."""
        del input_type  # only some formats tell them apart
        return True

    def finish(
        self, token_ids: TokenIds, input_type: InputType | None, *, instruction_tokens: int = 0
    ) -> RenderedPrompt:
        """Return what the model reads; ``token_ids`` has its special tokens already."""
        del input_type
        return RenderedPrompt(token_ids, instruction_tokens)

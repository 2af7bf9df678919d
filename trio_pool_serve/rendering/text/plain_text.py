"""The default text format: prefix, length limit by input type, special tokens and kept tokens of a text."""

from collections.abc import Mapping

from attrs import Factory, frozen

from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """The format of most models: no prefix, and the model's maximum length for every input type."""

    prefix: str = ""
    """Text in front of every input and its instruction."""
    limits: Mapping[InputType | None, int] = Factory(dict)
    """Maximum tokens of a text by input type, special tokens included, where less than the model's maximum."""

    def max_tokens_of(self, input_type: InputType | None, max_model_len: int) -> int:
        """Return the maximum number of tokens of a text of this input type."""
        return min(self.limits.get(input_type, max_model_len), max_model_len)

    def adds_special_tokens(self, input_type: InputType | None) -> bool:
        """Whether texts of this input type have special tokens at all."""
        del input_type
        return True

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Return the model input; ``token_ids`` already include special tokens."""
        del input_type
        return RenderedPrompt(token_ids)

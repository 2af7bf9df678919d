"""How a model reads a text, by role: prefix, length limit, special tokens, and which tokens have a vector."""

from collections.abc import Mapping

from attrs import Factory, frozen

from trio_pool_serve.prompts import Role
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """The format of most models: no prefix, no limit but the model maximum, whatever the role."""

    prefix: str = ""
    """What stands before every text, and before its instruction."""
    limits: Mapping[Role | None, int] = Factory(dict)
    """Most tokens of a text in a role, special tokens included, where that is not the model's limit."""

    def most_tokens(self, role: Role | None, max_model_len: int) -> int:
        """Return the most tokens that a text in this role may have."""
        return min(self.limits.get(role, max_model_len), max_model_len)

    def adds_special_tokens(self, role: Role | None) -> bool:
        """Tell whether texts in this role have special tokens at all."""
        del role  # only some formats tell them apart
        return True

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Return what the model reads; ``token_ids`` has its special tokens already."""
        del role
        return RenderedPrompt(token_ids, instruction_tokens)

"""The messages that rerankers pass to a chat template.

As sentence-transformers: a message of role ``query``, one of role ``document``, and the instruction as a system message
before them.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

STRUCTURED_PATTERNS = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""sentence-transformers' patterns for templates that expect a message's content as a list of parts."""


@frozen(kw_only=True)
class ChatFormat:
    """How a pair is passed to a chat template.

    ``structured`` passes a message's content as a list of parts. ``options`` are the template kwargs. ``required`` is
    true if the model's files declare this format; else it is used only if the template renders both texts. With
    ``instruction_is_variable`` the template has a variable ``instruction``, as vLLM's templates for rerankers do, in
    place of a system message.
    """

    structured: bool
    options: Mapping[str, Any]
    required: bool = True
    instruction_is_variable: bool = False

    def messages(self, first: str, second: str, instruction: str) -> list[dict[str, Any]]:
        """Return a pair as a conversation."""
        texts = [("query", first), ("document", second)]
        if instruction and not self.instruction_is_variable:
            texts.insert(0, ("system", instruction))
        return [{"role": role, "content": self._content(text)} for role, text in texts]

    def variables(self, instruction: str) -> Mapping[str, Any]:
        """Return the template kwargs of a pair."""
        return (
            {**self.options, "instruction": instruction}
            if instruction and self.instruction_is_variable
            else self.options
        )

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self.structured else text


def expects_content_parts(template: str) -> bool:
    """Whether a template looks as if it expects a message's content as a list of parts."""
    return any(pattern in template for pattern in STRUCTURED_PATTERNS)

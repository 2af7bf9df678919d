"""How two texts become messages for a chat template.

sentence-transformers' form for rerankers: a message of role ``query``, one of role ``document``, and the
instruction as a system message before them.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

STRUCTURED_PATTERNS = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""What sentence-transformers takes for a template that wants a message's content in parts."""


@frozen(kw_only=True)
class ChatFormat:
    """How messages are handed to the template.

    ``structured`` makes a message's content a list of parts. ``options`` are what the template is rendered
    with. ``required`` says that the files name this format; where they do not, it is used if the template has
    a place for both texts.
    """

    structured: bool
    options: Mapping[str, Any]
    required: bool = True

    def messages(self, first: str, second: str, instruction: str) -> list[dict[str, Any]]:
        """Return the conversation that two texts make."""
        said = [("query", first), ("document", second)]
        if instruction:
            said.insert(0, ("system", instruction))
        return [{"role": role, "content": self._content(text)} for role, text in said]

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self.structured else text


def expects_content_parts(template: str) -> bool:
    """Tell whether a template looks like one that wants a message's content in parts."""
    return any(pattern in template for pattern in STRUCTURED_PATTERNS)

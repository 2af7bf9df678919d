"""What is asked to be read, before anybody has looked at it: prompts, and how they become token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

TruncationSide: TypeAlias = Literal["left", "right"]

InputType: TypeAlias = Literal["query", "document"]
"""Which side of a search a text is on, for models that read the two differently."""


@frozen
class TextPrompt:
    """A text still to be tokenised."""

    text: str

    @property
    def estimated_tokens(self) -> int:
        """A cheap guess for admission, at the four characters a token that English text averages."""
        return len(self.text) // 4 + 1


@frozen(eq=False)
class TokensPrompt:
    """Token ids the client made itself: taken as they are, no special token is added.

    int64, because a client may send numbers that are no token ids at all.
    """

    token_ids: npt.NDArray[np.int64]

    @property
    def estimated_tokens(self) -> int:
        """The exact length."""
        return len(self.token_ids)


@frozen
class PairPrompt:
    """Two texts that a model reads together: a query and a document, a premise and a hypothesis.

    ``max_first_tokens`` and ``max_second_tokens`` cut each text before both are put together.
    """

    first: str
    second: str
    max_first_tokens: int | None = None
    max_second_tokens: int | None = None

    @property
    def estimated_tokens(self) -> int:
        """A cheap guess for admission, as for a text."""
        return (len(self.first) + len(self.second)) // 4 + 1


@frozen
class TextPart:
    """A text among the parts of an input."""

    text: str


@frozen
class ImagePart:
    """An image among the parts of an input: a ``data:``, ``http:``, ``https:`` or ``file:`` URL.

    ``place`` is where it stands in the request, as in ``input[3].image``, for errors.
    """

    url: str
    place: str = field(default="", eq=False)


Part: TypeAlias = TextPart | ImagePart

IMAGE_TOKENS = 256
"""What admission takes an image for, until it has been looked at."""


def _estimated(parts: Sequence[Part]) -> int:
    return sum(IMAGE_TOKENS if isinstance(part, ImagePart) else len(part.text) // 4 + 1 for part in parts)


@frozen
class ContentPrompt:
    """Texts and images that make one input together; at least one part."""

    parts: tuple[Part, ...]
    estimated_tokens: int = field(init=False)
    """A cheap guess for admission, made where the prompt is, which for large ones is not on the loop."""

    @estimated_tokens.default
    def _estimate(self) -> int:
        return _estimated(self.parts)


@frozen
class ChatMessage:
    """What one side of a conversation says."""

    role: str
    parts: tuple[Part, ...]


@frozen(kw_only=True)
class ChatPrompt:
    """A conversation, and how the chat template is to make a text of it.

    ``chat_template`` is one of the client's own (Jinja), ``None`` for the model's. ``template_kwargs`` are handed to
    it as JSON decodes them. ``add_generation_prompt`` ends the text with the beginning of an answer,
    ``continue_final_message`` leaves the last message open; they exclude each other.
    """

    messages: tuple[ChatMessage, ...]
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = Factory(dict)
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    estimated_tokens: int = field(init=False)
    """A cheap guess for admission, made where the prompt is, which for large ones is not on the loop."""

    @estimated_tokens.default
    def _estimate(self) -> int:
        return sum(_estimated(message.parts) for message in self.messages)


@frozen(eq=False)
class EmbedsPrompt:
    """Token embeddings that the client made itself, in place of tokens.

    ``payload`` is base64 of a serialised tensor, still to be decoded. Which form it has is seen from its first bytes.
    ``place`` is where it stands in the request, as in ``prompt_embeds[3]``, for errors.
    """

    payload: bytes | memoryview
    place: str = ""


Prompt: TypeAlias = TextPrompt | TokensPrompt | PairPrompt | ContentPrompt | ChatPrompt | EmbedsPrompt


@frozen
class RenderingParams:
    """How prompts become token ids.

    ``truncate_to`` is the most tokens kept, special tokens included; ``None`` refuses longer inputs.
    ``max_text_tokens`` cuts a text to so many tokens of its own before anything is added to it.
    ``instruction`` is put in front of every text; a model with a template of its own puts it where that
    says. ``input_type`` is for models that read queries and documents differently.
    """

    truncate_to: int | None = None
    truncation_side: TruncationSide = "right"
    add_special_tokens: bool = True
    instruction: str = ""
    input_type: InputType | None = None
    max_text_tokens: int | None = None

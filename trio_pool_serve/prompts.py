"""Prompts as clients send them, and rendering parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

TruncationSide: TypeAlias = Literal["left", "right"]

InputType: TypeAlias = Literal["query", "document"]
"""Role of a text in a search, for models that treat queries and documents differently."""


@frozen
class _Text:
    """A text, and an estimate of its tokens."""

    text: str

    @property
    def estimated_tokens(self) -> int:
        """An estimate for admission: four characters per token, the average of English text."""
        return len(self.text) // 4 + 1


@frozen
class TextPrompt(_Text):
    """A text to tokenise."""


@frozen
class ChunkedPrompt(_Text):
    """A text that is tokenised as a whole, and its chunks, each of which gets its own vector (late chunking).

    A chunk is the position (in code points) of its first character and the one after its last. Chunks are not empty;
    they may overlap and be in any order.
    """

    chunks: tuple[tuple[int, int], ...]


@frozen(eq=False)
class TokensPrompt:
    """Token ids from the client; no special tokens are added.

    int64, because clients may send ids outside any vocabulary.
    """

    token_ids: npt.NDArray[np.int64]

    @property
    def estimated_tokens(self) -> int:
        """The exact length."""
        return len(self.token_ids)


@frozen
class PairPrompt:
    """Two texts in one input: a query and a document, or a premise and a hypothesis.

    ``max_first_tokens`` and ``max_second_tokens`` truncate the texts before they are joined.
    """

    first: str
    second: str
    max_first_tokens: int | None = None
    max_second_tokens: int | None = None

    @property
    def estimated_tokens(self) -> int:
        """An estimate for admission, as for a text."""
        return (len(self.first) + len(self.second)) // 4 + 1


@frozen
class TextPart(_Text):
    """A text as part of an input."""


@frozen
class ImagePart:
    """An image as part of an input: a ``data:``, ``http:``, ``https:`` or ``file:`` URL.

    ``place`` is its position in the request, such as ``input[3].image``, for errors. ``fetched`` are the bytes of an
    ``http:`` or ``https:`` URL, once fetched.
    """

    url: str
    place: str = field(default="", eq=False)
    fetched: Sequence[bytes] | None = field(default=None, eq=False, repr=False)


Part: TypeAlias = TextPart | ImagePart

IMAGE_TOKENS = 256
"""Tokens that admission counts for an image; the real number is unknown before it is prepared."""


def _estimated(parts: Sequence[Part]) -> int:
    return sum(IMAGE_TOKENS if isinstance(part, ImagePart) else part.estimated_tokens for part in parts)


@frozen
class ContentPrompt:
    """Texts and images of one input; at least one part."""

    parts: tuple[Part, ...]
    estimated_tokens: int = field(init=False, default=Factory(lambda self: _estimated(self.parts), takes_self=True))
    """An estimate for admission, computed at construction: off the event loop for large prompts."""


@frozen
class ChatMessage:
    """One message of a conversation."""

    role: str
    parts: tuple[Part, ...]


@frozen(kw_only=True)
class ChatPrompt:
    """A conversation, and how a chat template renders it.

    ``chat_template`` is the client's (Jinja) or the name of one of the model's; ``None`` is the model's default.
    ``template_kwargs`` are passed to it as decoded from JSON. ``add_generation_prompt`` appends the beginning of an
    answer, ``continue_final_message`` leaves the last message open; they exclude each other.
    """

    messages: tuple[ChatMessage, ...]
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = Factory(dict)
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    estimated_tokens: int = field(
        init=False,
        default=Factory(lambda self: _estimated(self.parts), takes_self=True),
    )
    """An estimate for admission, computed at construction: off the event loop for large prompts."""

    @property
    def parts(self) -> list[Part]:
        """The parts of all messages."""
        return [part for message in self.messages for part in message.parts]


@frozen(eq=False)
class EmbedsPrompt:
    """Token embeddings from the client, in place of token ids.

    ``payload`` is a base64-encoded tensor, whose format is detected from its first bytes. ``place`` is its position in
    the request, such as ``prompt_embeds[3]``, for errors.
    """

    payload: bytes | memoryview
    place: str = ""


Prompt: TypeAlias = TextPrompt | ChunkedPrompt | TokensPrompt | PairPrompt | ContentPrompt | ChatPrompt | EmbedsPrompt


@frozen
class RenderingParams:
    """How to render prompts.

    ``truncate_to`` is the maximum number of tokens, including special tokens; ``None`` rejects inputs longer than the
    model's maximum. ``max_text_tokens`` truncates a text before anything is added to it. ``instruction`` is put in
    front of every text, or at its place in the model's template. ``input_type`` is for models that treat queries and
    documents differently, ``task`` for models that have adapters by task.
    """

    truncate_to: int | None = None
    truncation_side: TruncationSide = "right"
    add_special_tokens: bool = True
    instruction: str = ""
    input_type: InputType | None = None
    task: str | None = None
    max_text_tokens: int | None = None


ScoreInput: TypeAlias = str | ContentPrompt
"""A text, or texts and images that form one input."""


def prompt_of(side: ScoreInput) -> TextPrompt | ContentPrompt:
    """Return the prompt of a query or document."""
    return TextPrompt(side) if isinstance(side, str) else side


def has_images(prompt: Prompt | str) -> bool:
    """Return whether an input has parts other than text."""
    return isinstance(prompt, ContentPrompt | ChatPrompt) and any(isinstance(part, ImagePart) for part in prompt.parts)


def text_of(side: ScoreInput) -> str:
    """Return the texts of a side, one per line."""
    if isinstance(side, str):
        return side
    return "\n".join(part.text for part in side.parts if isinstance(part, TextPart))

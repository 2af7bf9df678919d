"""Contents, texts and images that make one input together; and messages, which a chat template renders to one input."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.field_values import (
    WireRequest,
    quoted,
    refuse_given,
    refused,
    require_few,
    require_given,
    require_some,
)
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, field_of, require_request
from trio_pool_serve.prompts import (
    ChatMessage,
    ChatPrompt,
    ContentPrompt,
    ImagePart,
    Part,
    Prompt,
    TextPart,
    TextPrompt,
)
from trio_pool_serve.rendering.memory_budget import in_units

LONGEST_SCHEME = 32


def image_part(image: str, *, place: str) -> ImagePart:
    """Return the part for a URL of an image, or for its bytes in bare base64. Raises ``EmptyInputError``."""
    require_given(image, at=place)
    return ImagePart(image if ":" in image[:LONGEST_SCHEME] else f"data:;base64,{image}", place)


def image_prompts(given: str | Sequence[object], max_inputs: int, *, param: str = "input") -> list[Prompt]:
    """Return a prompt for each of several images, or for one; ``param`` is the field that they are in.

    Raises ``InvalidRequestError`` for anything but strings, and for too many.
    """
    images = [given] if isinstance(given, str) else given
    require_some(images, max_inputs, param=param)
    require_request(
        all(isinstance(image, str) for image in images),
        "must be strings: URLs of images, or their bytes in base64.",
        at=param,
    )
    return [
        ContentPrompt((image_part(str(image), place=param if images is not given else f"{param}[{index}]"),))
        for index, image in enumerate(images)
    ]


@frozen(kw_only=True)
class ImageUrl:
    """The URL of an image; ``detail`` is ignored: it is for models that are not served here."""

    url: str
    detail: str | None = None


@frozen(kw_only=True)
class ContentPart:
    """A text or an image of a content, by its ``type``, or else by the field that is given."""

    type: str | None = None
    text: str | None = None
    image_url: str | ImageUrl | None = None
    image_base64: str | None = None

    def part(self, place: str) -> Part:
        """Return the part; ``place`` is where it is in the request. Raises ``InvalidRequestError`` for that field."""
        kind = self.type or ("text" if self.image_url is None else "image_url")
        name = {"input_text": "text", "input_image": "image_url"}.get(kind, kind)
        require_request(
            name in ("text", "image_url", "image_base64"),
            f"must be 'text', 'image_url' or 'image_base64', not {kind!r}.",
            at=f"{place}.type",
        )
        value: str | ImageUrl | None = getattr(self, name)
        if value is None:
            raise InvalidRequestError.at(place, f"has no `{name}`.")
        url = value.url if isinstance(value, ImageUrl) else value
        return TextPart(url) if name == "text" else image_part(url, place=place)


WireContent: TypeAlias = str | list[str | ContentPart]


@frozen(kw_only=True)
class ContentInput:
    """An input in parts, without a conversation around it."""

    content: WireContent

    def prompt(self, max_inputs: int, place: str) -> ContentPrompt:
        """Return the prompt; ``place`` is where it is in the request. Raises ``InvalidRequestError`` for that field."""
        parts = parts_of(self.content, f"{place}.content")
        require_given(parts, "has no text and no image.", at=place)
        require_few(len(parts), max_inputs, param=field_of(place), what="parts")
        return ContentPrompt(parts)

    def plain_prompt(self, max_inputs: int, place: str) -> TextPrompt | ContentPrompt:
        """Return the prompt; texts alone are one text, a line each. Raises as ``prompt``."""
        prompt = self.prompt(max_inputs, place)
        texts = [part.text for part in prompt.parts if isinstance(part, TextPart)]
        return TextPrompt("\n".join(texts)) if len(texts) == len(prompt.parts) else prompt


def parts_of(content: WireContent | tuple[()], place: str) -> tuple[Part, ...]:
    """Return the parts; ``place`` is where they are in the request. Raises ``InvalidRequestError`` for that field."""
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(
        TextPart(part) if isinstance(part, str) else part.part(f"{place}[{index}]")
        for index, part in enumerate(content)
    )


ConversationFlag: TypeAlias = Literal["add_generation_prompt", "continue_final_message"]
FLAGS = get_args(ConversationFlag)
CHAT_FIELDS = ("chat_template", "chat_template_kwargs", *FLAGS)

AS_LOADED = "images are prepared as the model's files say"

MAX_REPEATED_BYTES = 2**20
"""Bytes of template kwargs, which are encoded for each conversation of a request."""


@frozen(kw_only=True)
class WireMessage:
    """One message of a conversation."""

    role: str
    content: WireContent | None = None


WireMessages: TypeAlias = list[WireMessage | list[WireMessage]]
"""The messages of one conversation, or a list of conversations."""


@frozen(kw_only=True)
class ConversationFields(WireRequest):
    """The fields of a request that may hold conversations in place of an input."""

    messages: WireMessages | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = refused(AS_LOADED, [{}])
    media_io_kwargs: dict[str, Any] | None = refused(AS_LOADED, [{}])

    def conversations(self, given: WireMessages, max_inputs: int, *, param: str) -> list[ChatPrompt]:
        """Return the prompts that the messages in the field ``param`` make. Raises ``InvalidRequestError``."""
        require_given(given, at=param)
        messages = [item for item in given if isinstance(item, WireMessage)]
        batch = [item for item in given if isinstance(item, list)]
        require_request(
            not (messages and batch), "mixes messages and lists of messages; send one or the other.", at=param
        )
        if not all(batch):
            raise EmptyInputError.at(f"{param}[{batch.index([])}]", "is empty.")
        conversations = {f"{param}[{index}]": each for index, each in enumerate(batch)} or {param: messages}
        require_few(sum(map(len, conversations.values())), max_inputs, param=param, what="messages")
        self._refuse_repeated(len(conversations))
        prompts = [self._prompt(each, place) for place, each in conversations.items()]
        parts = sum(len(message.parts) for prompt in prompts for message in prompt.messages)
        require_few(parts, max_inputs, param=param, what="parts")
        return prompts

    def _refuse_repeated(self, conversations: int) -> None:
        """Raise ``InvalidRequestError`` if variables that go to the template with each conversation are many bytes."""
        if conversations == 1 or not self.chat_template_kwargs:
            return
        nbytes = len(msgspec.json.encode(self.chat_template_kwargs)) * conversations
        require_request(
            nbytes <= MAX_REPEATED_BYTES,
            f"chat_template_kwargs for {conversations} conversations exceeds {in_units(MAX_REPEATED_BYTES)}. "
            "Send fewer conversations at a time.",
            param="chat_template_kwargs",
        )

    def flag(self, name: ConversationFlag) -> bool | None:
        """Return a flag: the field, or else the template's variable of that name, which some clients send."""
        field: bool | None = getattr(self, name)
        among = (self.chat_template_kwargs or {}).get(name)
        try:
            return msgspec.convert(among, bool | None, strict=False) if field is None else field
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} must be true or false, not {quoted(among)}.", param="chat_template_kwargs"
            ) from error

    def _prompt(self, messages: Sequence[WireMessage], place: str) -> ChatPrompt:
        return ChatPrompt(
            messages=tuple(
                ChatMessage(message.role, parts_of(message.content or (), f"{place}[{index}].content"))
                for index, message in enumerate(messages)
            ),
            chat_template=self.chat_template,
            template_kwargs={
                name: value for name, value in (self.chat_template_kwargs or {}).items() if name not in FLAGS
            },
            add_generation_prompt=bool(self.flag("add_generation_prompt")),
            continue_final_message=bool(self.flag("continue_final_message")),
        )

    def refuse_chat_fields(self, param: str) -> None:
        """Raise ``InvalidRequestError`` for chat fields in a request whose prompts are in ``param``."""
        refuse_given(self, [name for name in CHAT_FIELDS if getattr(self, name)], f"is for messages, not for {param}")

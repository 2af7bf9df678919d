"""Conversations, and contents in parts, as clients send them."""

from typing import Any, TypeAlias

from attrs import frozen

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.types import ChatMessage, ChatPrompt, ContentPrompt, ImagePart, Part, TextPart

TEXT_TYPES = ("text", "input_text")
IMAGE_TYPES = ("image_url", "input_image")


@frozen(kw_only=True)
class ImageUrl:
    """Where an image is; ``detail`` is for models that are not here."""

    url: str
    detail: str | None = None


@frozen(kw_only=True)
class ContentPart:
    """A text or an image of a content. Which one, its ``type`` says, or else the field that is there."""

    type: str | None = None
    text: str | None = None
    image_url: str | ImageUrl | None = None

    def part(self, param: str) -> Part:
        """Return the part. Raises ``InvalidRequestError``, which blames ``param``."""
        kind = self.type or ("image_url" if self.image_url is not None else "text")
        if kind not in (*TEXT_TYPES, *IMAGE_TYPES):
            raise InvalidRequestError(
                f"Parts of type {kind!r} are not read; text and image_url are the types that are.", param=param
            )
        if kind in TEXT_TYPES:
            return TextPart(self._required(self.text, kind, "text", param))
        url = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url
        return ImagePart(self._required(url, kind, "image_url", param))

    @staticmethod
    def _required(value: str | None, kind: str, field: str, param: str) -> str:
        if value is None:
            raise InvalidRequestError(f"A part of type {kind!r} has no {field}.", param=param)
        return value


WireContent: TypeAlias = str | list[str | ContentPart]


@frozen(kw_only=True)
class WireMessage:
    """One message of a conversation."""

    role: str
    content: WireContent | None = None


@frozen(kw_only=True)
class WireContentInput:
    """An input in parts, without a conversation around it."""

    content: WireContent

    def prompt(self, network: NetworkConfig, param: str) -> ContentPrompt:
        """Return the prompt. Raises ``InvalidRequestError``."""
        parts = parts_of(self.content, param)
        if not parts:
            raise EmptyInputError("A content has no parts.", param=param)
        _require_few(len(parts), "parts", network, param)
        return ContentPrompt(parts)


@frozen(kw_only=True)
class ConversationFields:
    """The fields of a request that may hold a conversation in place of an input."""

    messages: list[WireMessage] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self, network: NetworkConfig) -> ChatPrompt:
        """Return the one prompt that the messages make. Raises ``InvalidRequestError``."""
        if not self.messages:
            raise EmptyInputError("messages is empty.", param="messages")
        messages = tuple(
            ChatMessage(message.role, parts_of(message.content or (), "messages")) for message in self.messages
        )
        _require_few(len(messages), "messages", network, "messages")
        _require_few(sum(len(message.parts) for message in messages), "parts", network, "messages")
        return ChatPrompt(
            messages=messages,
            chat_template=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt or False,
            continue_final_message=self.continue_final_message or False,
        )

    def refuse_beside(self, param: str) -> None:
        """Raise ``InvalidRequestError`` for what would say something about messages, were there any."""
        for name in ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is for messages, not for {param}.", param=name)


def parts_of(content: WireContent | tuple[()], param: str) -> tuple[Part, ...]:
    """Return the parts of a content. Raises ``InvalidRequestError``, which blames ``param``."""
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(TextPart(part) if isinstance(part, str) else part.part(param) for part in content)


def _require_few(count: int, what: str, network: NetworkConfig, param: str) -> None:
    """Each is handled by itself, so a conversation has as many as a request may have inputs."""
    if count > network.max_inputs_per_request:
        raise InvalidRequestError(f"{count} {what} are more than {network.max_inputs_per_request}.", param=param)

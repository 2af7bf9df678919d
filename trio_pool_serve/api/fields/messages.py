"""Conversations: the fields of a request for a chat template."""

from typing import Any

from attrs import frozen

from trio_pool_serve.api.fields.contents import WireContent, parts_of, require_few_parts
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ChatMessage, ChatPrompt


@frozen(kw_only=True)
class WireMessage:
    """One message of a conversation."""

    role: str
    content: WireContent | None = None


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
            ChatMessage(message.role, parts_of(message.content or (), f"messages[{index}].content"))
            for index, message in enumerate(self.messages)
        )
        require_few_parts(len(messages), "messages", network, "messages")
        require_few_parts(sum(len(message.parts) for message in messages), "parts", network, "messages")
        return ChatPrompt(
            messages=messages,
            chat_template=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt or False,
            continue_final_message=self.continue_final_message or False,
        )

    def refuse_chat_fields(self, param: str) -> None:
        """Raise ``InvalidRequestError`` for chat fields in a request whose prompts are in ``param``."""
        for name in ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is for messages, not for {param}.", param=name)

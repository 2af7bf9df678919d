"""Messages: conversations that a chat template renders to one input each, and the fields that go with them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import frozen

from trio_pool_serve.api.fields.contents import WireContent, parts_of
from trio_pool_serve.api.fields.limits import require_few_parts
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ChatMessage, ChatPrompt


@frozen(kw_only=True)
class WireMessage:
    """One message of a conversation."""

    role: str
    content: WireContent | None = None


WireMessages: TypeAlias = list[WireMessage | list[WireMessage]]
"""The messages of one conversation, or a list of conversations."""


@frozen(kw_only=True)
class ConversationFields:
    """The fields of a request that may hold conversations in place of an input."""

    messages: WireMessages | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversations(self, given: WireMessages, network: NetworkConfig, *, param: str) -> list[ChatPrompt]:
        """Return the prompts that the messages in the field ``param`` make. Raises ``InvalidRequestError``."""
        if not given:
            raise EmptyInputError(f"{param} is empty.", param=param)
        if len(set(map(type, given))) > 1:
            raise InvalidRequestError(f"{param} mixes messages and lists of messages.", param=param)
        batch = [item for item in given if isinstance(item, list)]
        if not batch:
            conversations = {param: [item for item in given if isinstance(item, WireMessage)]}
        elif all(batch):
            conversations = {f"{param}[{index}]": messages for index, messages in enumerate(batch)}
        else:
            raise EmptyInputError(f"A conversation in {param} is empty.", param=param)
        require_few_parts(sum(map(len, conversations.values())), "messages", network, param)
        prompts = [self._prompt(messages, place) for place, messages in conversations.items()]
        parts = sum(len(message.parts) for prompt in prompts for message in prompt.messages)
        require_few_parts(parts, "parts", network, param)
        return prompts

    def _prompt(self, messages: Sequence[WireMessage], place: str) -> ChatPrompt:
        kwargs = dict(self.chat_template_kwargs or {})
        # Clients also send these two among the template's variables; the fields count for more.
        generation = kwargs.pop("add_generation_prompt", None)
        open_ended = kwargs.pop("continue_final_message", None)
        if self.add_generation_prompt is not None:
            generation = self.add_generation_prompt
        if self.continue_final_message is not None:
            open_ended = self.continue_final_message
        return ChatPrompt(
            messages=tuple(
                ChatMessage(message.role, parts_of(message.content or (), f"{place}[{index}].content"))
                for index, message in enumerate(messages)
            ),
            chat_template=self.chat_template,
            template_kwargs=kwargs,
            add_generation_prompt=bool(generation),
            continue_final_message=bool(open_ended),
        )

    def refuse_chat_fields(self, param: str) -> None:
        """Raise ``InvalidRequestError`` for chat fields in a request whose prompts are in ``param``."""
        for name in ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is for messages, not for {param}.", param=name)

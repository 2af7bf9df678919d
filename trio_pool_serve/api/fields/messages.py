"""Messages: conversations that a chat template renders to one input each, and the fields that go with them."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from attrs import frozen

from trio_pool_serve.api.fields.contents import WireContent, parts_of
from trio_pool_serve.api.fields.given_fields import refuse_given, refused
from trio_pool_serve.api.fields.numbers import require_few_parts
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ChatMessage, ChatPrompt

ConversationFlag: TypeAlias = Literal["add_generation_prompt", "continue_final_message"]
FLAGS = get_args(ConversationFlag)
CHAT_FIELDS = ("chat_template", "chat_template_kwargs", *FLAGS)

AS_LOADED = "images are prepared as the model's files say"

MAX_REPEATED_BYTES = 2**20
"""Of template kwargs, which are encoded and sent to a process for each conversation of a request."""


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
    mm_processor_kwargs: dict[str, Any] | None = refused(AS_LOADED, [{}])
    media_io_kwargs: dict[str, Any] | None = refused(AS_LOADED, [{}])

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
        self._refuse_repeated(len(conversations))
        prompts = [self._prompt(messages, place) for place, messages in conversations.items()]
        parts = sum(len(message.parts) for prompt in prompts for message in prompt.messages)
        require_few_parts(parts, "parts", network, param)
        return prompts

    def _refuse_repeated(self, conversations: int) -> None:
        """Raise ``InvalidRequestError`` if variables that go to the template with each conversation are many bytes."""
        if conversations == 1 or not self.chat_template_kwargs:
            return
        nbytes = len(msgspec.json.encode(self.chat_template_kwargs)) * conversations
        if nbytes > MAX_REPEATED_BYTES:
            raise InvalidRequestError(
                f"chat_template_kwargs for {conversations} conversations are {nbytes} bytes; at most "
                f"{MAX_REPEATED_BYTES} are accepted. Send fewer conversations at a time.",
                param="chat_template_kwargs",
            )

    def flag(self, name: ConversationFlag) -> bool | None:
        """Return a flag: the field, or what clients send among the template's variables, which counts for less."""
        field: bool | None = getattr(self, name)
        among = (self.chat_template_kwargs or {}).get(name)
        try:
            return msgspec.convert(among, bool | None, strict=False) if field is None else field
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"{name} is true or false, not {among!r}.", param="chat_template_kwargs"
            ) from error

    def _prompt(self, messages: Sequence[WireMessage], place: str) -> ChatPrompt:
        kwargs = {name: value for name, value in (self.chat_template_kwargs or {}).items() if name not in FLAGS}
        return ChatPrompt(
            messages=tuple(
                ChatMessage(message.role, parts_of(message.content or (), f"{place}[{index}].content"))
                for index, message in enumerate(messages)
            ),
            chat_template=self.chat_template,
            template_kwargs=kwargs,
            add_generation_prompt=bool(self.flag("add_generation_prompt")),
            continue_final_message=bool(self.flag("continue_final_message")),
        )

    def refuse_chat_fields(self, param: str) -> None:
        """Raise ``InvalidRequestError`` for chat fields in a request whose prompts are in ``param``."""
        refuse_given(self, [name for name in CHAT_FIELDS if getattr(self, name)], f"is for messages, not for {param}")

"""Inputs: the fields of a request that become prompts, and the limits on them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from trio_pool_serve.api.fields.contents import WireContent, parts_of, require_few_parts
from trio_pool_serve.api.fields.images import InputObject
from trio_pool_serve.api.fields.numbers import TokenId
from trio_pool_serve.api.http.endpoint import FieldNames
from trio_pool_serve.api.http.payloads import PromptEmbeds
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokensPrompt


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


Input = str | list[str | TokenId | list[TokenId]]
"""A text, texts, token ids, lists of token ids."""

AnyInput = str | InputObject | list[str | TokenId | list[TokenId] | InputObject]
"""Also texts and images as objects, among texts that are strings."""


INPUT_FIELD_NAMES: FieldNames = {
    "prompts": ("messages", "prompt_embeds", "input"),
    "template_kwargs": "chat_template_kwargs",
    "truncate_to": "truncate_prompt_tokens",
}
"""What requests with ``InputFields`` call a job's fields."""


@frozen(kw_only=True)
class InputFields(ConversationFields):
    """The fields of a request with prompts: exactly one of ``input``, ``messages`` and ``prompt_embeds`` is given."""

    input: AnyInput | None = None
    prompt_embeds: PromptEmbeds | None = None
    add_special_tokens: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """Whether special tokens are added; a chat template brings its own."""
        return self.add_special_tokens is not False if self.messages is None else bool(self.add_special_tokens)

    def prompts(self, network: NetworkConfig) -> list[Prompt]:
        """Return the prompts of the field that is given. Raises ``InvalidRequestError``."""
        given = the_one_given(input=self.input, messages=self.messages, prompt_embeds=self.prompt_embeds)
        if given == "messages":
            return [self.conversation(network)]
        self.refuse_chat_fields(given)
        if self.prompt_embeds is not None:
            require_few(self.prompt_embeds.items, network, param=given)
            return [*self.prompt_embeds.prompts()]
        return prompts_of([] if self.input is None else self.input, network)


def the_one_given(**fields: object) -> str:
    """Return the name of the only field that is not null. Raises ``InvalidRequestError``."""
    given = [name for name, value in fields.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(fields)
        raise InvalidRequestError(
            f"Give one of {names}; {' and '.join(given) or 'none'} is there.", param=next(iter(fields))
        )
    return given[0]


def prompts_of(given: Input | AnyInput, network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Return the prompts of an input in any of its forms. Raises ``InvalidRequestError`` for the field ``param``."""
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given, InputObject):
        return [given.prompt(place=param)]
    if not given:
        raise EmptyInputError(f"{param} is empty.", param=param)
    kinds = set(map(type, given))
    if kinds == {str, InputObject} or kinds == {InputObject}:
        require_few(given, network, param=param)
        return [
            TextPrompt(item) if isinstance(item, str) else item.prompt(place=f"{param}[{index}]")  # type: ignore[union-attr]
            for index, item in enumerate(given)
        ]
    if len(kinds) > 1:
        raise InvalidRequestError(f"{param} mixes token ids and other inputs.", param=param)
    (kind,) = kinds
    if kind is int:
        return [_tokens_prompt(given, param)]  # type: ignore[arg-type]
    require_few(given, network, param=param)
    if kind is str:
        return [TextPrompt(text) for text in given]  # type: ignore[arg-type]
    return [_tokens_prompt(ids, param) for ids in given]  # type: ignore[arg-type]


def require_few(inputs: Sequence[object], network: NetworkConfig, *, param: str) -> None:
    """Raise ``InvalidRequestError`` for more inputs than ``--max-inputs-per-request``."""
    if len(inputs) > network.max_inputs_per_request:
        raise InvalidRequestError(f"{len(inputs)} inputs are more than {network.max_inputs_per_request}.", param=param)


def _tokens_prompt(ids: list[int], param: str) -> TokensPrompt:
    if not ids:
        raise EmptyInputError("An input has no tokens.", param=param)
    return TokensPrompt(np.array(ids, dtype=np.int64))

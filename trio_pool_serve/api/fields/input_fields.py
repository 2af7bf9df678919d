"""Inputs: the fields of a request that become prompts, and the types of inputs, such as queries and documents."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.api.fields.field_values import (
    Priority,
    TokenId,
    TruncationLength,
    WireRequest,
    quoted,
    require_few,
    require_given,
    require_some,
)
from trio_pool_serve.api.fields.messages import ConversationFields, WireContent, WireMessage, WireMessages, image_part
from trio_pool_serve.api.http.endpoint import FieldNames
from trio_pool_serve.api.http.json_body import PromptEmbeds
from trio_pool_serve.errors import InvalidRequestError, MissingFieldError, listed, require_request
from trio_pool_serve.models.files.task_adapters import of_task
from trio_pool_serve.prompts import (
    ContentPrompt,
    InputType,
    Prompt,
    TextPart,
    TextPrompt,
    TokensPrompt,
    TruncationSide,
)
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pool import PoolJob


@frozen(kw_only=True)
class InputObject:
    """An input as an object, as Jina's clients send it; a text and an image make one vector together.

    ``image`` is a URL, or base64. With a ``role`` it is a message of a conversation instead, as vLLM's clients send it.
    """

    text: str | None = None
    image: str | None = None
    role: str | None = None
    content: WireContent | None = None

    def prompt(self, *, place: str) -> Prompt:
        """Return the prompt; ``place`` is where it is in the request.

        Raises ``InvalidRequestError`` if it is empty, or part of it a message.
        """
        require_request(self.role is None and self.content is None, "is a message, but other inputs are not.", at=place)
        if self.image is not None:
            parts = () if self.text is None else (TextPart(self.text),)
            return ContentPrompt((*parts, image_part(self.image, place=f"{place}.image")))
        if self.text is None:
            raise InvalidRequestError.at(place, "has neither a text nor an image.")
        return TextPrompt(self.text)


Input = str | list[str | TokenId | list[TokenId]]
"""A text, texts, token ids, lists of token ids."""

AnyInput = str | InputObject | list[str | TokenId | InputObject | list[TokenId | InputObject]]
"""An ``Input``; or texts and images as objects, among texts that are strings; messages, and lists of messages."""

Padding: TypeAlias = bool | Literal["longest", "max_length", "do_not_pad"]
"""Padding as in transformers' tokenizers. No value changes an output: padding is masked, and models that were trained
with it always pad."""

INPUT_FIELD_NAMES: FieldNames = {
    "prompts": ("messages", "prompt_embeds", "input"),
    "template_kwargs": "chat_template_kwargs",
    "truncate_to": "truncate_prompt_tokens",
}
"""The names of a job's fields in requests with ``InputFields``."""


@frozen(kw_only=True, slots=False)  # ``InputFields`` has a second base class
class RequestOptions(WireRequest):
    """The options of requests for vectors, labels and scores, as vLLM's clients send them."""

    use_activation: bool | None = None
    padding: Padding | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: TruncationLength | None = None
    truncation_side: TruncationSide | None = None
    user: str | None = None
    priority: Priority | None = None
    request_id: str | None = None


@frozen(kw_only=True)
class InputFields(ConversationFields, RequestOptions):
    """The fields of a request with prompts: exactly one of ``input``, ``messages`` and ``prompt_embeds`` is given.

    Messages may be in ``input`` too. Every optional field may be null.
    """

    input: AnyInput | None = None
    prompt_embeds: PromptEmbeds | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None

    @property
    def input_params(self) -> InputParams:
        """How the inputs are rendered; a chat template brings special tokens of its own."""
        is_chat = self.messages is not None or self._messages_in_input is not None
        return InputParams(
            truncate_to=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            add_special_tokens=bool(self.add_special_tokens) if is_chat else self.add_special_tokens is not False,
            prompt_name=self.prompt_name,
        )

    def prompts(self, max_inputs: int) -> list[Prompt]:
        """Return the prompts of the field that is given. Raises ``InvalidRequestError``."""
        given = the_one_given(
            # OpenAI's client always sends an input: for vLLM, an empty one beside prompt_embeds.
            input=self.input if self.prompt_embeds is None else self.input or None,
            messages=self.messages,
            prompt_embeds=self.prompt_embeds,
        )
        messages = self._messages_in_input if self.messages is None else self.messages
        if messages is not None:
            return [*self.conversations(messages, max_inputs, param=given)]
        self.refuse_chat_fields(given)
        if self.prompt_embeds is not None:
            require_some(self.prompt_embeds.items, max_inputs, param=given)
            return [*self.prompt_embeds.prompts()]
        return prompts_of([] if self.input is None else self.input, max_inputs)

    @property
    def _messages_in_input(self) -> WireMessages | None:
        """The messages in ``input``, if its first object, or the first of its first list, has a role."""
        given = self.input if isinstance(self.input, list) else []
        first = given[0] if given else None
        first = first[0] if isinstance(first, list) and first else first
        if not isinstance(first, InputObject) or first.role is None:
            return None
        return [list(map(_message, item)) if isinstance(item, list) else _message(item) for item in given]


def _message(item: object) -> WireMessage:
    if isinstance(item, InputObject) and item.role is not None:
        require_request(
            item.text is None and item.image is None,
            "has a message with a text or an image outside `content`.",
            at="input",
        )
        return WireMessage(role=item.role, content=item.content)
    raise InvalidRequestError.at("input", "mixes messages and other inputs; send one or the other.")


def the_one_given(**fields: object) -> str:
    """Return the name of the only field that is not null. Raises ``InvalidRequestError``."""
    given = [name for name, value in fields.items() if value is not None]
    if len(given) != 1:
        several = InvalidRequestError(
            f"Send only one of {listed([f'`{name}`' for name in given], 'and')}.", param=next(iter(fields))
        )
        raise several if given else MissingFieldError(*fields)
    return given[0]


def prompts_of(given: Input | AnyInput, max_inputs: int, *, param: str = "input") -> list[Prompt]:
    """Return the prompts of an input in any of its forms. Raises ``InvalidRequestError`` for the field ``param``."""
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given, InputObject):
        return [given.prompt(place=param)]
    require_given(given, at=param)
    kinds = set(map(type, given))
    if kinds == {int}:
        return [_tokens_prompt(given, param)]
    require_request(
        len(kinds) == 1 or kinds == {str, InputObject},
        "mixes token ids and other inputs; send one or the other.",
        at=param,
    )
    require_few(len(given), max_inputs, param=param)
    if kinds == {list}:
        return [_tokens_prompt(ids, f"{param}[{index}]") for index, ids in enumerate(given)]
    return [
        TextPrompt(item) if isinstance(item, str) else item.prompt(place=f"{param}[{index}]")  # type: ignore[union-attr]
        for index, item in enumerate(given)
    ]


def _tokens_prompt(ids: Any, place: str) -> TokensPrompt:
    require_given(ids, "has no tokens.", at=place)
    try:
        return TokensPrompt(np.array(ids, dtype=np.int64))
    except TypeError:
        raise InvalidRequestError.at(place, "must be a list of token ids, or of messages.") from None


INPUT_TYPES: Mapping[str, InputType] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}
"""The sides of a search, by their names in the dialects."""


def with_input_type(
    job: PoolJob, input_type: str | None, model: Model, *, others: Sequence[str] = (), param: str = "input_type"
) -> PoolJob:
    """Return a job whose texts get the model's prompt for an input type.

    That is the prompt of the same name, if the model has one; otherwise, for the two sides of a search, the model's
    prompt for that side. The ``others`` that the dialect knows change nothing then. A prompt that the client has
    chosen stays; a ``prompt_name`` also selects the adapter, unless the field ``param`` is Jina's ``task``. Raises
    ``InvalidRequestError`` for other values of that field.
    """
    if input_type is None:
        return job
    prompts = model.folder.prompts
    if input_type not in {*INPUT_TYPES, *others, *prompts} and of_task(model.task_adapters, input_type) is None:
        known = listed(sorted({*INPUT_TYPES, *others, *model.task_adapters, *prompts}))
        raise InvalidRequestError.at(param, f"must be one of {known}, not {quoted(input_type)}.")
    input_params = job.input_params
    chosen = input_params.prompt_name is not None or input_params.instruction is not None
    named = input_type if input_type in prompts and not chosen else input_params.prompt_name
    side, task = INPUT_TYPES.get(input_type), input_type
    if param != "task" and input_params.prompt_name is not None:
        task = input_params.prompt_name
    return evolve(job, input_params=evolve(input_params, input_type=side, prompt_name=named, task=task))

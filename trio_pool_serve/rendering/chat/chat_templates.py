"""Conversations to texts by chat templates, each in a process that can be killed."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, frozen

from trio_pool_serve.errors import InvalidRequestError, JobField, UnavailableError, WorkerDiedError, WorkerTooSlowError
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.prompts import ChatMessage, ChatPrompt, ImagePart, Part
from trio_pool_serve.rendering.chat.template_process import MEMORY_BYTES, TemplateRequest, render_template
from trio_pool_serve.threads.offload import Offload

LOOP_CHARACTERS = 16 * 1024
"""Conversations up to this size are made into JSON on the loop, as bodies and answers are."""

LOOP_BYTES = 128 * 1024
"""Texts up to this size are decoded on the loop, in less time than a hop takes."""

CHARACTERS_PER_PART = 64
"""What a message or a part costs beside its text, as if it were text."""

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
    }
)
"""Names of what renders, which no variable of a template can have."""


@frozen(kw_only=True)
class ChatTemplate:
    """A template in Jinja, and what it is rendered with.

    ``variables`` are the special tokens, by name, and whatever the model's files hand to it. ``structured`` has
    texts handed to it as parts of a message; images always are. ``is_from_request`` says that it came with a request.
    """

    text: str
    variables: Mapping[str, Any]
    structured: bool
    is_from_request: bool = False


@define(eq=False)
class ChatTemplates:
    """Renders templates in processes of their own, which are killed after ``timeout_s`` seconds.

    Those of clients have other processes than the models' own: whoever sends endless ones waits for the like.
    """

    processes: WorkerProcesses
    request_template_processes: WorkerProcesses
    offload: Offload
    timeout_s: float

    async def render(self, template: ChatTemplate, prompt: ChatPrompt, *, max_characters: int) -> str:
        """Return the text of a conversation.

        Raises ``InvalidRequestError`` for a template or a conversation that cannot be rendered, within the time
        limit, the memory and ``max_characters`` that there are; ``UnavailableError`` when the server shuts down, or
        somebody kills the process.
        Cancellation: at once; the process keeps its place until it is done, or killed.
        """
        field: JobField = "prompts" if prompt.chat_template is None else "chat_template"
        if _is_small(prompt):
            question = _question(template, prompt)
        else:
            question = await self.offload.run("render", lambda: _question(template, prompt), abandon_on_cancel=True)
        processes = self.request_template_processes if template.is_from_request else self.processes
        try:
            text = await processes.call(render_template, question, max_characters, timeout_s=self.timeout_s)
        except WorkerTooSlowError as error:
            raise InvalidRequestError(
                f"The chat template took longer than the {self.timeout_s:g} s that it may take (--template-timeout-s).",
                field=field,
            ) from error
        except WorkerDiedError as error:
            if error.exit_code == -signal.SIGKILL:  # somebody else's doing
                raise UnavailableError("The process that rendered the chat template was killed.") from error
            raise InvalidRequestError(
                f"The chat template needs more than the {MEMORY_BYTES >> 20} MiB of memory that it may take.",
                field=field,
            ) from error
        except InvalidRequestError as error:
            raise type(error)(error.args[0], field=field) from error
        if len(text) <= LOOP_BYTES:
            return text.decode()
        return await self.offload.run("render", text.decode, abandon_on_cancel=True)


def _is_small(prompt: ChatPrompt) -> bool:
    """Tell whether encoding takes less time than a hop; variables that are trees might be of any size."""
    given = prompt.template_kwargs.values()
    if any(isinstance(value, list | dict) for value in given):
        return False
    left = LOOP_CHARACTERS - len(prompt.chat_template or "")
    left -= sum(len(value) for value in given if isinstance(value, str))
    for message in prompt.messages:
        for part in message.parts:
            left -= CHARACTERS_PER_PART + _length(part)
            if left < 0:
                return False
    return left >= CHARACTERS_PER_PART * len(prompt.messages)


def _length(part: Part) -> int:
    return 0 if isinstance(part, ImagePart) else len(part.text)


def _question(template: ChatTemplate, prompt: ChatPrompt) -> bytes:
    for name in prompt.template_kwargs:
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"{name} is no variable of a template and cannot be one of {{template_kwargs}}.",
                field="template_kwargs",
            )
    question = TemplateRequest(
        template=template.text,
        messages=template_messages(prompt.messages, structured=template.structured),
        variables={**template.variables, **prompt.template_kwargs},
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )
    try:
        return msgspec.json.encode(question)
    except UnicodeError as error:
        raise InvalidRequestError("An input is not valid Unicode text.", field="prompts") from error
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"These cannot be handed to a template: {error}", field="template_kwargs") from (
            error
        )


def template_messages(messages: Sequence[ChatMessage], *, structured: bool) -> list[dict[str, Any]]:
    """Return messages as templates want them; a message with an image is always in parts."""
    return [{"role": message.role, "content": _content(message.parts, structured=structured)} for message in messages]


def _content(parts: Sequence[Part], *, structured: bool) -> str | list[dict[str, str]]:
    if not structured and not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts if not isinstance(part, ImagePart))
    return [{"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts]

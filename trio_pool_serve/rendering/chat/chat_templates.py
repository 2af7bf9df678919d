"""Renders chat templates in processes that can be killed."""

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import msgspec
from attrs import define, frozen

from trio_pool_serve.errors import (
    InvalidRequestError,
    JobField,
    UnavailableError,
    WorkerDiedError,
    WorkerTooSlowError,
    require_request,
)
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.prompts import ChatPrompt, ImagePart, Part
from trio_pool_serve.rendering.chat.template_sandbox import MEMORY_BYTES, render_template
from trio_pool_serve.threads.offload import Offload

TIMEOUT_S = 5.0
"""Time limit for rendering one conversation; a model's own template takes milliseconds."""

LOOP_CHARACTERS = 16 * 1024
"""Conversations up to this size are encoded to JSON on the event loop, as bodies and responses are."""

LOOP_BYTES = 128 * 1024
"""Texts up to this size are decoded on the event loop, in less time than a thread hop takes."""

CHARACTERS_PER_PART = 64
"""The cost of a message or part in addition to its text, as a number of characters."""

RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "conversations", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "return_tensors", "return_dict",
})  # fmt: skip
"""Parameter names of transformers' rendering functions, which are not accepted as template kwargs."""


@frozen(kw_only=True)
class ChatTemplate:
    """A Jinja template and its variables.

    ``variables`` are the special tokens by name and the template kwargs of the model's files. ``structured`` passes
    texts as a list of parts; messages with images always are. ``is_from_request`` is true for a client's template.
    """

    text: str
    variables: Mapping[str, Any]
    structured: bool
    is_from_request: bool = False


@define(eq=False)
class ChatTemplates:
    """Renders templates in child processes, which are killed after ``timeout_s`` seconds.

    Clients' templates have separate processes, so endless ones delay only other clients' templates.
    """

    processes: Mapping[str, WorkerProcesses]
    """For models' templates (``template``) and, if they are trusted, for clients' (``client_template``)."""
    offload: Offload
    timeout_s: float = TIMEOUT_S

    async def render(self, template: ChatTemplate, prompt: ChatPrompt, client: int = 0, *, max_characters: int) -> str:
        """Return the text of a conversation, rendered in the turns of a client.

        Raises ``InvalidRequestError`` for a template or a conversation that cannot be rendered within the limits of
        time, memory and ``max_characters``; ``UnavailableError`` if the server shuts down, the process is killed from
        outside, or the model's own template takes too long. Cancellation: at once; the process keeps its slot until it
        finishes or is killed.
        """
        field: JobField = "prompts" if prompt.chat_template is None else "chat_template"
        encode = partial(_encoded_request, template, prompt)
        request = encode() if _is_small(prompt) else await self.offload.in_turn(client, encode)
        processes = self.processes["client_template" if template.is_from_request else "template"]
        try:
            text = await processes.call(
                render_template, request, max_characters, client=client, timeout_s=self.timeout_s
            )
        except WorkerTooSlowError as error:
            limit = f"took longer than {self.timeout_s:g} s."
            if not template.is_from_request:  # it is fast enough unless the server is busy
                raise UnavailableError(f"The model's chat template {limit}") from error
            raise InvalidRequestError(f"The chat template {limit}", field=field) from error
        except WorkerDiedError as error:
            if error.exit_code == -signal.SIGKILL:  # not by this server
                raise UnavailableError("The process that rendered the chat template was killed: try again.") from error
            raise InvalidRequestError(
                f"The chat template needs more than {MEMORY_BYTES >> 20} MiB of memory.", field=field
            ) from error
        except InvalidRequestError as error:
            raise type(error)(error.args[0], field=field) from error
        return text.decode() if len(text) <= LOOP_BYTES else await self.offload.in_turn(client, text.decode)


def _is_small(prompt: ChatPrompt) -> bool:
    """Whether encoding takes less time than a thread hop; lists and dicts as variables can have any size."""
    given = prompt.template_kwargs.values()
    sizes = chain(
        [len(prompt.chat_template or "")],
        (len(value) for value in given if isinstance(value, str)),
        (CHARACTERS_PER_PART * (1 + len(message.parts)) for message in prompt.messages),
        (len(part.text) for message in prompt.messages for part in message.parts if not isinstance(part, ImagePart)),
    )
    if any(isinstance(value, list | dict) for value in given):
        return False
    return all(size <= LOOP_CHARACTERS for size in accumulate(sizes))


def _encoded_request(template: ChatTemplate, prompt: ChatPrompt) -> bytes:
    """Return the arguments of ``render_conversation`` in JSON."""
    for name in prompt.template_kwargs:
        require_request(
            name not in RESERVED_VARIABLES, f"{{template_kwargs}} cannot set {name}.", field="template_kwargs"
        )
    request = {
        "template": template.text,
        "messages": [
            {"role": message.role, "content": _content(message.parts, structured=template.structured)}
            for message in prompt.messages
        ],
        "variables": {**template.variables, **prompt.template_kwargs},
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }
    try:
        return msgspec.json.encode(request)
    except UnicodeError as error:
        raise InvalidRequestError(
            "An input contains a lone surrogate, which is not valid Unicode.", field="prompts"
        ) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{{template_kwargs}} cannot be passed to a template: {error}", field="template_kwargs"
        ) from error


def _content(parts: Sequence[Part], *, structured: bool) -> str | list[dict[str, str]]:
    """Return a message's content in the form for templates: with an image it is always a list of parts."""
    if not structured and not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts if not isinstance(part, ImagePart))
    return [{"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts]

"""What the processes run that render chat templates: transformers' sandbox, and nothing that the loop needs.

Kept small, because each process imports it: no torch, no numpy of ours, no server.
"""

import multiprocessing
import os
import sys
from typing import Any

import msgspec
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError

MEMORY_BYTES = 512 * 2**20
"""What rendering may take beside what the imports took (185 MiB of addresses, 65 MiB of memory). A conversation of
16 MB, the largest body by default, takes less than a third of it."""

MAX_ERROR_CHARACTERS = 500
"""Of what a template says when it refuses; it says that in its own words, of any length."""


@frozen(kw_only=True)
class TemplateRequest:
    """What is rendered. ``variables`` are what the template sees beside the messages."""

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def prepare() -> None:
    """Import what rendering needs, and bound what it can take from the machine from then on."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[[]], chat_template="")
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as sizes:  # noqa: PTH123  (a process of few imports)
            taken = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def render_template(question: bytes, max_characters: int) -> bytes:
    """Return the text, UTF-8, that a template makes of the JSON of a ``TemplateRequest``.

    Raises ``InvalidRequestError`` for whatever goes wrong with it. A process that runs out of memory leaves: what a
    render has left behind must not be the next one's trouble.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    text, said = "", ""
    try:
        asked = msgspec.json.decode(question, type=TemplateRequest)
        texts: Any = render_jinja_template(
            conversations=[asked.messages],
            chat_template=asked.template,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **asked.variables,
        )
        text = texts[0][0]
        utf8 = text.encode() if len(text) <= max_characters else b""
    except MemoryError:
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        raise
    except Exception as error:
        said = f"{error}"[:MAX_ERROR_CHARACTERS] or type(error).__name__
    # Not inside the block: an error that knows another travels with all of that one's frames, of which a template
    # can make too many to be sent.
    if said:
        raise InvalidRequestError(f"The chat template cannot be rendered: {said}")
    if len(text) > max_characters:
        raise InvalidRequestError(
            f"The chat template makes {len(text)} characters of this conversation; at most {max_characters} are read."
        )
    return utf8

"""Chat template rendering in child processes.

Each process imports this module, so it imports little: no torch, transformers, numpy or server.
"""

import multiprocessing
import os
import sys
from typing import Any

import msgspec
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.rendering.chat.template_sandbox import render_conversation

MEMORY_BYTES = 512 * 2**20
"""Memory limit of rendering, in addition to what the imports take (36 MiB of address space, 30 MiB of memory). A
conversation of 16 MB, the largest body by default, takes less than a third of it."""

MAX_ERROR_CHARACTERS = 500
"""Maximum length of a template's error message, which the template itself can make arbitrarily long."""


@frozen(kw_only=True)
class TemplateRequest:
    """A template and all its inputs. ``variables`` are those other than the messages."""

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def prepare() -> None:
    """Limit the memory of a process that has imported all that rendering needs. Runs once in each."""
    render_conversation("", [], {})
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as sizes:  # noqa: PTH123  (a process of few imports)
            taken = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def render_template(encoded_request: bytes, max_characters: int) -> bytes:
    """Return the rendered text, UTF-8, of a JSON-encoded ``TemplateRequest``.

    Raises ``InvalidRequestError`` for any failure of the template. A process that runs out of memory exits, so that
    memory left behind by one template cannot make the next one fail.
    """
    text, message = "", ""
    try:
        request = msgspec.json.decode(encoded_request, type=TemplateRequest)
        text = render_conversation(
            request.template,
            request.messages,
            request.variables,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        utf8 = text.encode() if len(text) <= max_characters else b""
    except MemoryError:
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        raise
    except Exception as error:
        message = f"{error}"[:MAX_ERROR_CHARACTERS] or type(error).__name__
    # Outside the except block: a chained exception is sent with all frames of its cause, of which a template can make
    # too many to send.
    if message:
        raise InvalidRequestError(f"The chat template cannot be rendered: {message}")
    if len(text) > max_characters:
        raise InvalidRequestError(
            f"The chat template makes {len(text)} characters of this conversation; at most {max_characters} are read."
        )
    return utf8

"""Renders chat templates as transformers does, with jinja2 alone: its sandbox, and the functions in it.

Processes that render templates import this module, so it imports little: no torch, transformers or numpy.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trio_pool_serve.errors import require_request

OPEN_END = "END_OF_LAST_MESSAGE_8f3a61 "
"""Text appended to the last message to find its end. The blank shows whether the template strips messages."""


class Generation(Extension):
    """The block ``generation``, which marks an assistant's words; its variables end with it."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> Node:
        """Return the content of the block."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateNamespace(Namespace):
    """``namespace`` without underscored names: libraries look for methods by such names."""

    def __init__(*args: Any, **values: Any) -> None:  # ``self`` may be one of the values
        super(TemplateNamespace, args[0]).__init__()
        for name, value in dict(*args[1:], **values).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a value. Raises ``SecurityError`` for an underscored name."""
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}: names must not begin with an underscore")
        super().__setitem__(name, value)


class DictMaker:
    """``dict`` for templates, without the attributes of a class."""

    __call__: Any = staticmethod(dict)
    fromkeys = staticmethod(dict.fromkeys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(  # jinja2's own filter escapes ``<`` and others for HTML
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (as templates may call it)
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


SANDBOX = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
SANDBOX.filters["tojson"] = _to_json
SANDBOX.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.now().strftime(form),
    "dict": DictMaker(),
    "namespace": TemplateNamespace,
}


_compiled: Callable[[str], jinja2.Template] = lru_cache(SANDBOX.from_string)


def render_conversation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Return a conversation's text. ``variables`` are all other variables of the template, JSON's types only.

    With ``continue_final_message`` the text ends where the last message does. Raises any exception that the template
    raises, and ``ValueError`` if that end is not found or ``tools`` or ``documents`` are no lists of objects.
    """
    given = {"tools": None, "documents": None, **variables}
    for name in ("tools", "documents"):
        if not all(isinstance(each, dict) for each in given[name] or ()):
            raise ValueError(f"{name} must be a list of objects")
    final = ""
    if continue_final_message:
        final, last = _opened(messages)
        messages = [*messages[:-1], last]
    text = _compiled(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
    if not continue_final_message:
        return text
    end = text.rfind(OPEN_END.strip())
    if end < 0 or final.strip() not in text or "content" not in template:
        raise ValueError("the template does not render the last message whole, so it cannot be continued")
    return text[:end] if text.startswith(OPEN_END, end) else text[:end].rstrip()


def _opened(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Return the last text of the last message, and that message with ``OPEN_END`` after the text."""
    content: Any = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return content, {**messages[-1], "content": content + OPEN_END}
    for index, part in reversed([*enumerate(content or ())]):
        if "text" in part:
            parts = [*content[:index], {**part, "text": part["text"] + OPEN_END}, *content[index + 1 :]]
            return part["text"], {**messages[-1], "content": parts}
    raise ValueError("the last message has no text to continue")


MEMORY_BYTES = 512 * 2**20
"""Memory limit of rendering, in addition to the imports (36 MiB of address space, 30 MiB of memory). A
conversation of 16 MB, the largest body by default, takes less than a third of it."""

MAX_ERROR_CHARACTERS = 500
"""Maximum length of a template's error message, which the template itself can make arbitrarily long."""


def prepare() -> None:
    """Limit the memory of a process that has imported all that rendering needs. Runs once in each process."""
    render_conversation("", [], {})
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as sizes:  # noqa: PTH123  (a process of few imports)
            taken = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def render_template(encoded_request: bytes, max_characters: int) -> bytes:
    """Return the rendered text in UTF-8; the request is the arguments of ``render_conversation`` in JSON.

    Raises ``InvalidRequestError`` for any failure of the template. A process that runs out of memory exits, so that
    memory that one template leaves allocated cannot make the next one fail.
    """
    text, message = "", ""
    try:
        text = render_conversation(**msgspec.json.decode(encoded_request))
        utf8 = text.encode() if len(text) <= max_characters else b""
    except MemoryError:
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        raise
    except Exception as error:
        message = f"{error}"[:MAX_ERROR_CHARACTERS] or type(error).__name__
    # Outside the except block: a chained exception is sent with all frames of its cause, of which a template can make
    # too many to send.
    require_request(not message, f"The chat template cannot be rendered: {message}")
    require_request(
        len(text) <= max_characters,
        f"The chat template makes {len(text)} characters of this conversation; the limit is {max_characters}.",
    )
    return utf8

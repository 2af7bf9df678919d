"""Base64 of tensors within a JSON body, found without parsing it.

A JSON parser holds the interpreter lock while it walks through a string of a hundred megabytes, and again while it
makes a copy. So the long strings of ``prompt_embeds`` are cut out of the body first, in pieces between which others
run, and stay where they are; in their place the parser sees placeholders that are random for each body: a client that
could guess one would have one payload decoded as often as it repeats the placeholder.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.errors import EmptyInputError
from trio_pool_serve.prompts import EmbedsPrompt

FIELD = "prompt_embeds"

LONG = 64 * 1024
"""Characters; shorter strings are left to the parser."""

SEARCHED_AT_ONCE = 256 * 1024
"""Bytes: some twenty microseconds."""

BEFORE_FIRST = re.compile(rb'[ \t\r\n]{0,64}:[ \t\r\n]{0,64}(\[?)[ \t\r\n]{0,64}"')
BEFORE_NEXT = re.compile(rb'[ \t\r\n]{0,64},[ \t\r\n]{0,64}"')

Payload: TypeAlias = bytes | memoryview


class Payloads:
    """The field as it is decoded: one payload or several. Not an attrs class, of which msgspec would make an object."""

    def __init__(self, items: Sequence[Payload]) -> None:
        self.items = items

    def prompts(self) -> list[EmbedsPrompt]:
        """Return a prompt for each. Raises ``EmptyInputError`` if there are none."""
        if not self.items:
            raise EmptyInputError(f"{FIELD} is empty.", param=FIELD)
        if len(self.items) == 1:
            return [EmbedsPrompt(self.items[0])]
        return [EmbedsPrompt(item, f"{FIELD}[{index}]") for index, item in enumerate(self.items)]


PromptEmbeds: TypeAlias = Annotated[
    Payloads,
    msgspec.Meta(
        description="Base64 of a tensor [tokens, hidden] as safetensors or numpy.save write it; or a list.",
        extra_json_schema={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    ),
]
"""The type of the field ``prompt_embeds`` in a wire type."""


def cut_payloads(body: Buffer, most: int) -> tuple[Buffer | bytes, dict[str, memoryview]]:
    """Return the body without its long payloads, and those by their placeholders.

    At most ``most`` strings are looked at. What does not look as expected is left to the parser, with all behind it.
    """
    key = f'"{FIELD}"'.encode()
    place = find(body, key, 0) if most and len(body) > LONG else -1
    if place < 0 or body[place - 1 : place] == b"\\":  # then it is the end of a longer string
        return body, {}
    token = secrets.token_hex(16)
    cuts: dict[str, memoryview] = {}
    pieces: list[bytes | memoryview] = []
    kept = 0
    view = memoryview(body)
    opening = BEFORE_FIRST.match(body, place + len(key))
    is_list = opening is not None and opening[1] == b"["
    looked_at = 0
    while opening is not None and looked_at < most:
        looked_at += 1
        begin = opening.end()
        end = find(body, b'"', begin)
        if end < 0:
            return body, {}
        if end - begin > LONG and find(body, b"\\", begin, end) < 0:
            name = f"#{token}{len(cuts)}"
            pieces += [view[kept:begin], name.encode()]
            cuts[name] = view[begin:end]
            kept = end
        opening = BEFORE_NEXT.match(body, end + 1) if is_list else None
    return (b"".join([*pieces, view[kept:]]), cuts) if cuts else (body, {})


def find(body: Buffer | bytes, what: bytes, begin: int = 0, end: int | None = None) -> int:
    """Return the first place of ``what`` in a body, −1 if there is none, searching it in pieces."""
    last = len(body) if end is None else end
    for start in range(begin, last, SEARCHED_AT_ONCE):
        found = body.find(what, start, min(start + SEARCHED_AT_ONCE + len(what) - 1, last))
        if found >= 0:
            return found
    return -1


def payload_decoder(cuts: Mapping[str, memoryview]) -> Callable[[type, Any], Any]:
    """Return the hook by which msgspec puts the cut payloads into ``Payloads`` when it decodes the rest of a body."""

    def decode(kind: type, value: Any) -> Payloads:
        if kind is not Payloads:
            raise NotImplementedError(f"There is no decoding to {kind}.")
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise TypeError("Expected `str | list[str]`")
        return Payloads([cuts.get(string) or _encoded(string) for string in strings])

    return decode


def _encoded(string: str) -> bytes:
    """Return the characters as bytes; those that base64 does not have become others that it does not have."""
    return string.encode("ascii", "replace")

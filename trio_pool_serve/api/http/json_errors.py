"""Errors in JSON bodies, in words for the client that sent them."""

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.errors import InvalidRequestError, MissingFieldError, field_of, listed

MOST_BLANKS = 64
"""Bytes; a body that is blank so far is called empty."""

READ_AGAIN = 16 * 1024
"""Bytes; only shorter bodies are parsed a second time, to quote the wrong value."""

KINDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "list[str]": "a list of strings",
    "object": "an object",
}
"""msgspec's names of types in words."""

BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}

UNEXPECTED = re.compile(r"Expected `([^`]+)`( of length)?(?: ([<>]=?))?(?: ([-\d.e]+))?(?:, got `?(\w+)`?)?")
"""msgspec's message for a value of another type, or out of bounds."""

SURROGATE = re.compile("[\ud800-\udfff]")


def wrong_value(error: msgspec.ValidationError, body: Buffer | bytes, wire_type: Any) -> InvalidRequestError:
    """Return the error for a body that is valid JSON, but not a ``wire_type``."""
    what, _, at = str(error).partition(" - at `")
    place = at.rstrip("`").rpartition("$")[2].replace("[...]", "").lstrip(".")
    name, param = place or "The body", field_of(place) or None
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return (
            InvalidRequestError(f"{place} has no `{missing[1]}`.", param=param)
            if place
            else MissingFieldError(missing[1])
        )
    if wrong := re.fullmatch(r"Invalid enum value (.*)", what, re.DOTALL):
        choices = dict.fromkeys(_choices(wire_type, re.findall(r"\w+", re.sub(r"\[\d+\]", "", place))))
        return InvalidRequestError(f"{name} must be {listed([*map(repr, choices)])}, not {wrong[1]}.", param=param)
    if not (expected := UNEXPECTED.match(what)):
        return InvalidRequestError(f"{name}: {what}.", param=param)
    types, is_length, bound, limit, got = expected.groups()
    kinds = [KINDS.get(kind, kind) for kind in types.split(" | ") if kind != "null"]
    bounds = " ".join(filter(None, [is_length and "of a length", BOUNDS.get(bound), limit]))
    sent = KINDS.get(got, got)
    if got in (None, "int", "float", "bool") and isinstance(value := _value_at(body, place), int | float):
        sent = msgspec.json.encode(value).decode()[:100]
    wanted = f"{name} must be {listed(kinds)} {bounds}".strip()
    return InvalidRequestError(f"{wanted}, not {sent}." if sent else f"{wanted}.", param=param)


def invalid_json(error: Exception, body: Buffer | bytes) -> InvalidRequestError:
    """Return the error for a body that is not valid JSON."""
    if not body[:MOST_BLANKS].strip():
        return InvalidRequestError("The body is empty; it must be a JSON object.")
    for place, character in _surrogates(body):
        message = f"{place} contains a lone surrogate, \\u{ord(character):x}, which is not valid Unicode."
        return InvalidRequestError(message, param=field_of(place))
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequestError("The body is not valid UTF-8.")
    if "truncated" in str(error):  # msgspec's word for a body that is incomplete
        return InvalidRequestError("The body is not valid JSON: it ends in the middle of a value.")
    return InvalidRequestError(f"The body is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}.")


def unknown_field(name: str, known: Sequence[str]) -> InvalidRequestError:
    """Return the error for a field that a request does not have."""
    meant = "".join(f" Did you mean `{other}`?" for other in get_close_matches(name, known, 1))
    return InvalidRequestError(f"Unknown field `{name}`.{meant}", param=name)


def _choices(hint: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the choices of the field at a path below a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif path and hasattr(hint, "__annotations__"):
        yield from _choices(get_type_hints(hint).get(path[0]), path[1:])
    else:
        for part in get_args(hint):
            yield from _choices(part, path)


def _value_at(body: Buffer | bytes, place: str) -> Any:
    """Return the value at a place of a body; ``None`` if it cannot be found."""
    try:
        value: Any = msgspec.json.decode(body) if len(body) <= READ_AGAIN else None
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", place):
            value = value[name] if name else value[int(index)]
    except (LookupError, TypeError, RecursionError, msgspec.DecodeError):
        return None
    return value


def _surrogates(body: Buffer | bytes) -> Iterator[tuple[str, str]]:
    """Yield the lone surrogates in a body, with their places; none for one that the standard library cannot parse."""
    try:
        pending = deque([("", json.loads(bytes(body)))] if len(body) <= READ_AGAIN else [])
    except (ValueError, RecursionError):
        return
    while pending:
        place, value = pending.popleft()
        if isinstance(value, str) and (found := SURROGATE.search(value)):
            yield place or "The body", found[0]
        elif isinstance(value, list):
            pending += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            pending += [(f"{place}.{name}".lstrip("."), item) for name, item in value.items()]

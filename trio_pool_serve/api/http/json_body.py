"""JSON request bodies: decoded into wire types, errors in them, limits on their values, and tensors cut out before."""

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from attrs import fields_dict

from trio_pool_serve.api.http.endpoint import LOOP_BYTES
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.errors import InvalidRequestError, MissingFieldError, field_of, listed, require_request
from trio_pool_serve.prompts import EmbedsPrompt

T = TypeVar("T")

FEW_FIELDS_BYTES = 64 * 1024

FEW_FIELDS = 256
"""Commas; a body with no more is decoded on the loop up to ``FEW_FIELDS_BYTES``: an image in base64, or a long text.

31 KB of it take 120 µs, as many bytes of numbers 1.4 ms. A thread gets the interpreter lock from a busy loop only after
milliseconds."""

_SEARCHED = 512
"""Bytes at both ends of a body in which the name of the model is looked for."""

_SIMPLE_FIELD = rb'"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*'

_MODEL = rb'"model"\s*:\s*"([^"\\]*)"\s*'

_MODEL_FIRST = re.compile(rb"\s*\{\s*(?:" + _SIMPLE_FIELD + rb",\s*)*" + _MODEL + rb"[,}]")

_MODEL_LAST = re.compile(rb",\s*" + _MODEL + rb"(?:,\s*" + _SIMPLE_FIELD + rb")*\}\s*\Z")


def model_named_in(body: Buffer | bytes) -> str | None:
    """Return the model that a body names, without decoding it; ``None`` if that is not known.

    It is found within 512 bytes of the beginning of the body or its end if no list, no object and no escaped character
    is between. If it is named twice, the first name may be returned, while decoding takes the last.
    """
    found = _MODEL_FIRST.match(body[:_SEARCHED]) or _MODEL_LAST.search(body[-_SEARCHED:])
    return None if found is None else found[1].decode(errors="replace")


def is_quick_to_decode(body: Buffer) -> bool:
    """Return whether a body is decoded on the event loop: in a thread, it would take longer."""
    if len(body) <= LOOP_BYTES:
        return True
    return isinstance(body, bytearray) and len(body) <= FEW_FIELDS_BYTES and body.count(b",") <= FEW_FIELDS


@cache
def _decoder(wire_type: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of bodies from which nothing was cut out."""
    return msgspec.json.Decoder(wire_type, strict=False, dec_hook=payload_decoder({}))


def decode_json(
    body: Buffer | bytes, wire_type: type[T], *, strict: bool = False, cuts: Mapping[str, memoryview] | None = None
) -> T:
    """Decode a body. Raises ``InvalidRequestError``, with ``strict`` also for unknown fields.

    ``cuts`` are the payloads that were cut out of the body, by their placeholders.
    """
    try:
        # Not strict about types: clients of other servers send numbers and truth values as strings.
        decoded: T = (
            msgspec.json.decode(body, type=wire_type, strict=False, dec_hook=payload_decoder(cuts))
            if cuts
            else _decoder(wire_type).decode(body)  # type: ignore[arg-type]
        )
        for name in _decoder(dict[str, msgspec.Raw]).decode(body) if strict else ():
            if name not in (known := fields_dict(wire_type)):  # type: ignore[arg-type]
                raise unknown_field(name, [*known])
    except msgspec.ValidationError as error:
        raise wrong_value(error, body, wire_type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(error, body) from error
    except RecursionError as error:
        raise InvalidRequestError("The body is nested too deeply.") from error
    return decoded


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


COUNTED_FROM = 256 * 1024
"""Bytes; a shorter body is parsed in a few milliseconds, whatever it holds."""

COUNTED_AT_ONCE = 256 * 1024

MAX_VALUES = 2**20
"""Maximum values of a body, such as 2048 inputs with 512 token ids each. They take some twenty milliseconds."""

PER_INPUT = 32
"""Strings, and lists and objects, that a body may have for each input that it may have."""

QUOTE, COMMA, BRACKET, BRACE = b'",[{'


def refuse_many_values(body: Buffer | bytes, inputs: int, values: int = MAX_VALUES) -> None:
    """Raise ``InvalidRequestError`` for a body with more than ``values`` values, or too many for ``inputs`` inputs.

    They are counted before a parser makes an object of each: it holds the interpreter lock until it is done, and so
    does freeing these objects. Sixteen megabytes of ``[[1],[1],…`` take more than a second. Counting goes through the
    body in pieces, mostly without the lock.
    """
    most = inputs * PER_INPUT
    if len(body) < COUNTED_FROM or _counts_fit(body, most, values):
        return
    counts = np.zeros(256, dtype=np.int64)
    inside, escape = False, b""
    for begin in range(0, len(body), COUNTED_AT_ONCE):
        piece = escape + bytes(body[begin : begin + COUNTED_AT_ONCE])
        # Behind a backslash nothing ends a string; one at the end belongs to the next piece.
        plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        escape = b"\\" if plain.endswith(b"\\") else b""
        characters = np.frombuffer(plain, dtype=np.uint8)
        within = np.logical_xor.accumulate(characters == QUOTE) ^ inside
        counts += np.bincount(characters[~within], minlength=256)  # a closing quote is outside, an opening one not
        inside = bool(within[-1])
        containers = counts[BRACKET] + counts[BRACE]
        for what, count, limit in (
            ("strings", counts[QUOTE], most),
            ("lists and objects", containers, most),
            ("values", counts[COMMA], values),
        ):
            require_request(
                count <= limit,
                f"The body has more than {limit} {what}, the limit for {inputs} inputs (--max-inputs-per-request). "
                "Send fewer inputs at a time.",
            )


def _counts_fit(body: Buffer | bytes, most: int, values: int) -> bool:
    """Return whether the counts fit even if characters within strings are counted, too."""
    characters = np.frombuffer(body, dtype=np.uint8)
    pieces = [characters[begin : begin + COUNTED_AT_ONCE] for begin in range(0, len(characters), COUNTED_AT_ONCE)]
    quotes, commas, brackets, braces = (
        sum(int(np.count_nonzero(piece == each)) for piece in pieces) for each in (QUOTE, COMMA, BRACKET, BRACE)
    )
    return quotes // 2 <= most and brackets + braces <= most and commas <= values


# A JSON parser holds the interpreter lock while it walks through a string of a hundred megabytes, and again while it
# makes a copy. So the long strings of ``prompt_embeds`` are cut out of the body first, in pieces between which others
# run, and stay where they are; the parser sees placeholders instead. They are random for each body: a client that
# guessed one could have one payload decoded as often as it repeats the placeholder.

FIELD = "prompt_embeds"

LONG = 64 * 1024
"""Characters; shorter strings are left to the parser."""

SEARCHED_AT_ONCE = 256 * 1024
"""Bytes of one search, of some twenty microseconds."""

BEFORE_FIRST = re.compile(rb'[ \t\r\n]{0,64}:[ \t\r\n]{0,64}(\[?)[ \t\r\n]{0,64}"')
BEFORE_NEXT = re.compile(rb'[ \t\r\n]{0,64},[ \t\r\n]{0,64}"')


class Payloads:
    """The decoded field: one payload or several. Not an attrs class: msgspec would expect an object."""

    def __init__(self, items: Sequence[bytes | memoryview]) -> None:
        self.items = items

    def prompts(self) -> list[EmbedsPrompt]:
        """Return a prompt for each."""
        are_several = len(self.items) > 1
        return [EmbedsPrompt(item, f"{FIELD}[{at}]" if are_several else "") for at, item in enumerate(self.items)]


PromptEmbeds: TypeAlias = Annotated[
    Payloads,
    msgspec.Meta(
        description="Base64 of a tensor [tokens, hidden] as safetensors or numpy.save write it; or a list.",
        extra_json_schema={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    ),
]
"""The type of the field ``prompt_embeds`` in a wire type."""


def cut_payloads(body: Buffer, most: int) -> tuple[Buffer | bytes, dict[str, memoryview]]:
    """Return the body without its long payloads, and the payloads by their placeholders.

    At most ``most`` strings are looked at. At anything unexpected, the rest of the body is left to the parser.
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


def find(body: Buffer | bytes, wanted: bytes, begin: int = 0, end: int | None = None) -> int:
    """Return the first place of ``wanted`` in a body, −1 if there is none. Searches in pieces."""
    last = len(body) if end is None else end
    for start in range(begin, last, SEARCHED_AT_ONCE):
        found = body.find(wanted, start, min(start + SEARCHED_AT_ONCE + len(wanted) - 1, last))
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
        # Characters outside ASCII become ``?``, which is not in base64, either.
        return Payloads([cuts.get(string) or string.encode("ascii", "replace") for string in strings])

    return decode

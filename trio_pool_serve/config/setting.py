"""Descriptions of settings, for ``--help``, errors and ``docs/settings.md``."""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from attrs import Attribute, frozen

from trio_pool_serve.errors import require

RELATIONS = {">": "more than", ">=": "at least", "<": "less than", "<=": "at most"}


Text = Annotated[str, msgspec.Meta(min_length=1)]

WORDS: Mapping[Any, str] = {int: "a whole number", bool: "true or false", str: "a text", Text: "a text, not empty"}


@frozen
class Setting:
    """The description of one setting; ``default`` describes a default whose value alone is unclear."""

    text: str
    default: str | None = None


def entries_of(text: str) -> list[str]:
    """Return the entries of a list with commas, without the blanks around them."""
    return [entry for entry in map(str.strip, text.split(",")) if entry]


def flag_of(name: str) -> str:
    """Return the flag of the field ``name``."""
    return f"--{name.replace('_', '-')}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, written: Callable[[str], str] = str) -> str:
    """Return the end of a message about an unknown name: the most similar known one, or else ``otherwise``.

    ``written`` returns a name as users write it.
    """
    similar = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {written(similar[0])}?" if similar else otherwise


def converted(key: str, value: object, kind: Any) -> Any:
    """Return a value of JSON or TOML as the type of a setting. Raises ``ValueError`` with the accepted values."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        parts = (kind, *get_args(kind))  # of an optional setting
        words = {part: "a list of texts" for part in parts if get_origin(part) is tuple} | dict(WORDS)
        accepted = ", ".join(choices_of(kind)) or next(words[part] for part in parts if part in words)
        raise ValueError(f"`{key}` is {value!r}; accepted: {accepted}.") from error


def choices_of(kind: Any) -> list[str]:
    """Return the values of a literal type, or of a union of literals."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def plain_message(error: ValueError) -> str:
    """Return the message of an error about a setting, by its flag; attrs says "'limit' must be >= 0: -1"."""
    message = str(error.args[0])
    by_attrs = re.fullmatch(r"'(\w+)' must be ([<>]=?) (\S+): (.*)", message)
    if by_attrs is None:
        return message
    name, relation, bound, value = by_attrs.groups()
    return f"{flag_of(name)} must be {RELATIONS[relation]} {bound}, not {value}."


def matches(pattern: str, what: str) -> "Callable[[object, Attribute[Any], object], None]":
    """Return a validator for values whose text matches a regular expression; its error describes them as ``what``."""

    def validate(_: object, attribute: "Attribute[Any]", value: object) -> None:
        require(
            re.fullmatch(pattern, str(value), re.ASCII) is not None,
            f"{flag_of(attribute.name)}: `{value}` is not {what}.",
            ValueError,
        )

    return validate


def within(least: int, most: int) -> "Callable[[object, Attribute[Any], float], None]":
    """Return a validator for numbers from ``least`` to ``most``; its error shows both."""

    def validate(_: object, attribute: "Attribute[Any]", value: float) -> None:
        require(
            least <= value <= most,
            f"{flag_of(attribute.name)} must be from {least} to {most}, not {value}.",
            ValueError,
        )

    return validate

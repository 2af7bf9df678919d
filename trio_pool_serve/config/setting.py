"""Descriptions of settings, for ``--help``, errors and ``docs/settings.md``."""

import re
from collections.abc import Callable
from typing import Any

from attrs import Attribute, frozen

RELATIONS = {">": "more than", ">=": "at least", "<": "less than", "<=": "at most"}


@frozen
class Setting:
    """The description of one setting; ``default`` describes a default whose value says too little."""

    text: str
    default: str | None = None


def entries_of(text: str) -> list[str]:
    """Return the entries of a list with commas, without the blanks around them."""
    return [entry for entry in map(str.strip, text.split(",")) if entry]


def flag_of(name: str) -> str:
    """Return the flag of the field ``name``."""
    return f"--{name.replace('_', '-')}"


def plain_message(error: ValueError) -> str:
    """Return the message of an error about a setting, by its flag; attrs says "'port' must be <= 65535: 70000"."""
    message = str(error.args[0])
    by_attrs = re.fullmatch(r"'(\w+)' must be ([<>]=?) (\S+): (.*)", message)
    if by_attrs is None:
        return message
    name, relation, bound, value = by_attrs.groups()
    return f"{flag_of(name)}: must be {RELATIONS[relation]} {bound}, not {value}."


def matches(pattern: str, what: str) -> "Callable[[object, Attribute[Any], object], None]":
    """Return a validator for values whose text matches a regular expression; its error names ``what`` is accepted."""

    def validate(_: object, attribute: "Attribute[Any]", value: object) -> None:
        if not re.fullmatch(pattern, str(value), re.ASCII):
            raise ValueError(f"{flag_of(attribute.name)}: `{value}` is not {what}.")

    return validate

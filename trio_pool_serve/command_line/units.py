"""Sizes and durations as people write them: ``16MiB``, ``30s``."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cyclopts import Token

SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")},
}
SIZES |= {f"{letter}i{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")}
"""Factors of units in lower case: ``k`` and ``kb`` are 1000 bytes, ``ki`` and ``kib`` 1024."""

DURATIONS = {"": 1, "s": 1, "ms": 0.001, "m": 60, "min": 60, "h": 3600, "d": 86400}


def converter_of(name: str, value_type: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    """Return the cyclopts converter for a number, by the unit in its name; ``None`` for what is no number."""
    if name.endswith("_bytes"):
        return lambda _, tokens: round(_parsed(tokens[0].value, SIZES, "a size, such as 16MiB, 500MB or 4096 (bytes)"))
    if name.endswith("_s"):
        accepted = "a duration, such as 30s, 500ms, 2m or 0.5 (seconds)"
        return lambda _, tokens: _parsed(tokens[0].value, DURATIONS, accepted)
    if value_type == int | Literal["auto"]:
        return lambda _, tokens: "auto" if tokens[0].value == "auto" else _whole(tokens[0].value, "auto or ")
    if value_type in (int, int | None):
        return lambda _, tokens: _whole(tokens[0].value)
    return None


def shown(name: str, value: object) -> str:
    """Return the value of a field as people write it."""
    if name.endswith("_bytes") and isinstance(value, int) and value:
        power = next(power for power in range(4, -1, -1) if value % 1024**power == 0)
        return f"{value // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return f"{value:g}s" if name.endswith("_s") and isinstance(value, float) else str(value)


def _whole(text: str, alternative: str = "") -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text):
        raise ValueError(f"`{text}` is not {alternative}a whole number.")
    return int(text)


def _parsed(text: str, units: Mapping[str, float], what: str) -> float:
    number = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *([a-z]*)", text.strip().lower())
    parsed = math.inf if number is None or number[2] not in units else float(number[1]) * units[number[2]]
    if math.isinf(parsed):
        raise ValueError(f"`{text}` is not {what}.")
    return parsed

"""Flags of commands, made from the classes of settings, and their values with units: ``16MiB``, ``30s``."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import attrs
from cyclopts import Group, Parameter, Token

from trio_pool_serve.config import Config
from trio_pool_serve.config.setting import Setting, plain_message
from trio_pool_serve.errors import require

Result = TypeVar("Result")

GROUPS = {
    "loading": "Model",
    "network": "Network",
    "scheduling": "Scheduling",
    "processes": "Processes",
    "hosts": "Engines on other machines",
    "threads": "Threads",
    "time_limits": "Time limits",
    "input": "Input",
    "logging": "Logging",
    "batch": "Batch API",
    "model_changes": "Models at run time",
}
"""Headings of the help, in their order, by the field of ``Config`` whose fields are flags."""

COMMON = frozenset({
    "served_model_name", "dtype", "device", "max_model_len", "long_text", "task", "pooling", "trust_remote_code",
    "host", "port", "api_key", "api_keys_file", "cors_allow_origins", "ssl_certfile", "ssl_keyfile",
    "max_batch_tokens", "max_queue_s", "replicas", "request_timeout_s", "client_timeout_s", "drain_timeout_s",
    "log_level", "log_format", "access_log",
})  # fmt: skip
"""The settings that ``--help`` shows; ``--help-all`` shows all."""

SIZES = {"": 1, "b": 1} | {
    f"{letter}{between}{end}": base**power
    for base, between in ((1000, ""), (1024, "i"))
    for power, letter in enumerate("kmgt", 1)
    for end in ("", "b")
}
"""Factors of units in lower case: ``k`` and ``kb`` are 1000 bytes, ``ki`` and ``kib`` 1024."""

DURATIONS = {"": 1, "s": 1, "ms": 0.001, "m": 60, "min": 60, "h": 3600, "d": 86400}


def with_settings(
    command: Callable[..., Result], groups: Iterable[str] = GROUPS, *, shows_all: bool = False
) -> Callable[..., Result]:
    """Return ``command`` with a keyword parameter for each setting of some groups, or for single ones, ``GROUP.NAME``.

    ``command`` gets each group as an object by the group's name. Calling it raises ``ValueError``, which names the
    flag, if a value is not accepted. ``shows_all``: its help shows all settings, otherwise only the common ones.
    """
    names = [entry.partition(".")[::2] for entry in groups]
    kinds = {group: kind_of(group) for group, _ in names}
    parameters = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for group, kind in kinds.items():
        single = {name for its_group, name in names if its_group == group} - {""}
        parameters += [
            _flag(field, group, setting, shows_all=shows_all, is_shown=shows_all or field.name in COMMON | single)
            for field, setting in settings_of(kind)
            if not single or field.name in single
        ]

    def run(*positional: Any, **given: Any) -> Result:
        groups = {group: _made(kind, given) for group, kind in kinds.items()}
        return command(*positional, **given, **groups)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def kind_of(group: str) -> type:
    """Return the class of a group's settings."""
    return cast("type", attrs.fields_dict(Config)[group].type)


def settings_of(kind: type) -> Iterator[tuple["attrs.Attribute[Any]", Setting]]:
    """Yield the fields of a class of settings with their descriptions; ``type`` is the type of a field's values."""
    hints = get_type_hints(kind, include_extras=True)
    for field in attrs.fields(kind):
        value_type, setting = get_args(hints[field.name])
        yield field.evolve(type=value_type), setting


def _flag(
    field: "attrs.Attribute[Any]", group: str, setting: Setting, *, shows_all: bool, is_shown: bool
) -> inspect.Parameter:
    first_sentence = re.split(r"(?<=\.) (?=[A-Za-z0-9`])", setting.text)[0]
    is_exact = shows_all or setting.default is None  # other defaults take a line
    parameter = Parameter(
        help=setting.text if shows_all else first_sentence,
        group=Group(GROUPS[group], sort_key=1 + list(GROUPS).index(group)),
        negative=() if field.type is bool else None,  # a switch; only ``bool | None`` has a ``--no-`` form
        show_default=(lambda default: setting.default or shown(field.name, default)) if is_exact else False,
        converter=converter_of(field.name, field.type),
        metavar=_metavar(field),
        show_choices=field.name != "max_batch_tokens",  # "auto" is not all that it accepts
        show=is_shown,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[field.type, parameter]
    )


def _metavar(field: "attrs.Attribute[Any]") -> str:
    if field.name.endswith("_bytes"):
        return "SIZE"
    if field.name.endswith("_s"):
        return "TIME"
    if {int, float} & {field.type, *get_args(field.type)}:
        return "N"
    return "PATH" if field.type in (Path, Path | None) else "TEXT"


def _made(kind: type, given: dict[str, Any]) -> Any:
    """Return an object of a class from the values of its fields, which are removed from ``given``."""
    values = {field.name: given.pop(field.name) for field in attrs.fields(kind) if field.name in given}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(plain_message(error)) from error


def converter_of(name: str, value_type: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    """Return the cyclopts converter of a number, by the unit in its name; ``None`` for other values."""
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
    """Return the value of a field with its unit."""
    if name.endswith("_bytes") and isinstance(value, int) and value:
        power = next(power for power in range(4, -1, -1) if value % 1024**power == 0)
        return f"{value // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return f"{value:g}s" if name.endswith("_s") and isinstance(value, float) else str(value)


def _whole(text: str, alternative: str = "") -> int:
    require(
        re.fullmatch(r"[+-]?\d{1,18}", text) is not None, f"`{text}` is not {alternative}a whole number.", ValueError
    )
    return int(text)


def _parsed(text: str, units: Mapping[str, float], what: str) -> float:
    number = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *([a-z]*)", text.strip().lower())
    parsed = math.inf if number is None or number[2] not in units else float(number[1]) * units[number[2]]
    require(not math.isinf(parsed), f"`{text}` is not {what}.", ValueError)
    return parsed

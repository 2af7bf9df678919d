"""Flags of commands, made from the configuration's classes, which know nothing of a command line."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import attrs
from cyclopts import Group, Parameter

from trio_pool_serve.command_line.units import converter_of, shown
from trio_pool_serve.config import Config
from trio_pool_serve.config.setting import Setting, plain_message

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
"""The fields of ``Config`` whose own fields are flags, in the order of the help, with its headings."""

COMMON = frozenset({
    "served_model_name", "dtype", "device", "max_model_len", "long_text", "task", "pooling", "trust_remote_code",
    "host", "port", "api_key", "api_keys_file", "cors_allow_origins", "ssl_certfile", "ssl_keyfile",
    "max_batch_tokens", "max_queue_s", "replicas", "request_timeout_s", "client_timeout_s", "drain_timeout_s",
    "log_level", "log_format", "access_log",
})  # fmt: skip
"""The settings that ``--help`` shows; ``--help-all`` shows all."""


def with_settings(
    command: Callable[..., Result], groups: Iterable[str] = GROUPS, *, shows_all: bool = False
) -> Callable[..., Result]:
    """Return ``command`` with a keyword parameter for each setting of some groups, or for a single ``GROUP.NAME``.

    ``command`` gets each group as an object by the group's name. Calling it raises ``ValueError`` that names the flag
    of a value that is not accepted. ``shows_all``: its help shows all settings, not only those that are common.
    """
    names = [entry.partition(".")[::2] for entry in groups]
    kinds = {group: kind_of(group) for group, _ in names}
    own = inspect.signature(command).parameters.values()
    parameters = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
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
    kind = attrs.fields_dict(Config)[group].type
    assert kind is not None  # noqa: S101  (it is annotated)
    return kind


def settings_of(kind: type) -> Iterator[tuple["attrs.Attribute[Any]", Setting]]:
    """Yield the fields of a class of settings with their descriptions; ``type`` of each is that of its values."""
    hints = get_type_hints(kind, include_extras=True)
    for field in attrs.fields(kind):
        value_type, *extras = get_args(hints[field.name])
        for setting in extras:
            if isinstance(setting, Setting):
                yield field.evolve(type=value_type), setting


def _flag(
    field: "attrs.Attribute[Any]", group: str, setting: Setting, *, shows_all: bool, is_shown: bool
) -> inspect.Parameter:
    first_sentence = re.split(r"(?<=\.) (?=[A-Za-z0-9`])", setting.text)[0]
    is_exact = shows_all or setting.default is None  # other defaults take a line
    parameter = Parameter(
        help=setting.text if shows_all else first_sentence,
        group=Group(GROUPS[group], sort_key=1 + list(GROUPS).index(group)),
        negative=() if setting.is_switch else None,
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
    """Return an object of a class, from those of the values that are of its fields, which are taken out."""
    values = {field.name: given.pop(field.name) for field in attrs.fields(kind) if field.name in given}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(plain_message(error)) from error

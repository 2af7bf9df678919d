"""Settings of logs."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import in_
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]


@Parameter(name="*", group=Group("Logging", sort_key=8))
@frozen(kw_only=True)
class LoggingConfig:
    """What is logged to standard error."""

    log_level: Annotated[
        LogLevel,
        help_(
            "Minimum severity of logged messages. debug: also the messages of unexpected errors, which may quote what "
            "clients send."
        ),
    ] = field(default="info", validator=in_(get_args(LogLevel)))
    log_format: Annotated[
        LogFormat,
        help_("auto: text on a terminal, json otherwise. json: one JSON object per line."),
    ] = field(default="auto", validator=in_(get_args(LogFormat)))
    access_log: Annotated[
        bool, switch("Log an event for every request. Requests that fail with a status from 500 on always have one.")
    ] = False

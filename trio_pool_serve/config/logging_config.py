"""Settings of logs."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import in_

from trio_pool_serve.config.setting import Setting, switch

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]


@frozen(kw_only=True)
class LoggingConfig:
    """Logs on standard error."""

    log_level: Annotated[
        LogLevel,
        Setting(
            "Minimum severity of messages. With debug, the messages of unexpected errors are logged, too; they "
            "may quote what clients send."
        ),
    ] = field(default="info", validator=in_(get_args(LogLevel)))
    log_format: Annotated[
        LogFormat,
        Setting("Log format; auto is text on a terminal, else json. json is one object per line."),
    ] = field(default="auto", validator=in_(get_args(LogFormat)))
    access_log: Annotated[
        bool, switch("Log every request. Requests that fail with a status of 500 or more are always logged.")
    ] = False

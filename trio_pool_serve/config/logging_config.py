"""Settings of logs and traces."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import gt, in_, matches_re, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]


@Parameter(name="*", group=Group("Logging", sort_key=8))
@frozen(kw_only=True)
class LoggingConfig:
    """What is logged to standard error, and traced."""

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
    access_log_rate: Annotated[
        int,
        help_(
            "Maximum number of requests that each API process logs in a second, and of failed ones besides. Others are "
            "counted by status, and the counts logged once a second."
        ),
    ] = field(default=100, validator=gt(0))
    otlp_endpoint: Annotated[
        str | None,
        help_(
            "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://localhost:4318`. A span for "
            "each request is sent to its `/v1/traces`. Needs the extra `otel`.",
            default="from the environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`, or none",
        ),
    ] = field(default=None, validator=optional(matches_re(r"https?://[^\s/].*")))

"""Logs on stderr: text for people on a terminal, JSON lines otherwise, never with a client's text; the access log.

Modules log with the standard library's ``logging``, and the fields of an event as ``extra``.
"""

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, TypeAlias

import trio
from attrs import define, field
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.msgspec import MsgspecFormatter

from trio_pool_serve.config import LoggingConfig
from trio_pool_serve.errors import related_errors
from trio_pool_serve.processes.standard_error import detach_standard_error
from trio_pool_serve.telemetry.start_display import end_display, silence_libraries

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

MAX_FRAMES = 40
"""Frames of each traceback that are logged, the innermost."""

MAX_ERRORS = 10
"""Errors that are logged together: an error, its causes, and the members of its group."""

VERBOSE = ("hypercorn.error", "httpx", "filelock", "huggingface_hub", "urllib3", "opentelemetry")
"""Loggers of libraries that log only warnings and errors."""


PERIOD_S = 1.0

MAX_PER_PERIOD = 100
"""Events of each kind per period. A line takes 50 µs of the event loop and 300 bytes: more would slow the server."""


def configure_logging(config: LoggingConfig, fields: Mapping[str, str] = MappingProxyType({})) -> None:
    """Log to stderr in the format of ``--log-format``, with ``fields`` in every event of this process."""
    detach_standard_error()
    handler: logging.Handler = logging.StreamHandler()
    silence_libraries()
    logging.captureWarnings(capture=True)
    if logs_json(config) or not sys.stderr.isatty():
        end_display()
    else:
        from trio_pool_serve.telemetry.terminal import TerminalHandler  # imported here: 50 ms, for terminals only

        handler = TerminalHandler()
    handler.setFormatter(formatter_of(config))

    def add_fields(record: logging.LogRecord) -> bool:
        vars(record).update(fields)
        return True

    handler.addFilter(add_fields)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    for verbose in VERBOSE:
        logging.getLogger(verbose).setLevel(logging.WARNING)


def logs_json(config: LoggingConfig) -> bool:
    """Whether logs are JSON lines."""
    return config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty())


def formatter_of(config: LoggingConfig) -> logging.Formatter:
    """Return the formatter of ``--log-format``; ``--log-level debug`` shows errors with messages and source lines.

    JSON lines have ``time`` (seconds since the epoch), ``level``, ``logger``, ``process``, ``message``, the event's
    fields, and for an error ``error_trace``.
    """
    formatter: logging.Formatter
    if logs_json(config):
        formatter = MsgspecFormatter(
            "%(created)s %(levelname)s %(name)s %(process)d %(message)s",
            rename_fields={"created": "time", "levelname": "level", "name": "logger", "exc_info": "error_trace"},
        )
    elif sys.stderr.isatty():
        formatter = TextFormatter("%(message)s", "[%X]")
    else:
        formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level != "debug":
        formatter.formatException = places_of  # type: ignore[assignment, method-assign]
    return formatter


class TextFormatter(logging.Formatter):
    """Lines for people: the message, then the event's fields as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the standard library's name)
        """Return the line, without the lines of an error."""
        fields = {name: value for name, value in vars(record).items() if name not in _RESERVED and value is not None}
        line = super().formatMessage(record)
        return line + "".join(f" {name}={_in_one_line(value)}" for name, value in fields.items())


def places_of(exc_info: ExcInfo) -> str:
    """Return the types of an error and its causes, and the functions and lines that each went through.

    Leaves out messages, which may quote a client's text, and the paths of files.
    """
    lines: list[str] = []
    for error in islice(related_errors(exc_info[1]) if exc_info[1] else (), MAX_ERRORS):
        lines.append(f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."))
        frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
        lines += [f"  {frame.f_globals.get('__name__')}:{line} {frame.f_code.co_name}" for frame, line in frames]
    return "\n".join(lines)


def _in_one_line(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


_RESERVED = frozenset((*RESERVED_ATTRS, "taskName", "markup", "highlighter"))


logger = logging.getLogger("trio_pool_serve.telemetry.access_log")
"""Not this module's logger, so that the access log can be filtered by name."""


@define(eq=False)
class AccessLog:
    """Logs an event for each request, or with ``only_failures`` for requests that failed in the server.

    At most ``MAX_PER_PERIOD`` successes and as many failures are logged per second, so that failures are seen among any
    number of successes. The rest are counted by status, and ``run`` logs the counts once a second.
    """

    only_failures: bool = False
    clock: Callable[[], float] = trio.current_time
    left_out: Counter[str] = field(init=False, factory=Counter)
    """Requests that were not logged by themselves, by status, since the counts were last logged."""
    _since: float = field(init=False, default=-PERIOD_S)
    _logged: dict[bool, int] = field(init=False, factory=dict)
    """Events in this period, by whether they are failures."""
    _leaves_out: trio.Event = field(init=False, factory=trio.Event)

    def wants(self, *, failed: bool) -> bool:
        """Return whether an event would be logged or counted, so that it is worth making."""
        return failed or not self.only_failures

    def add(self, event: Mapping[str, Any], *, failed: bool) -> None:
        """Log an event, or count it by its ``status``, or by its ``outcome`` if it has none."""
        now = self.clock()
        if now >= self._since + PERIOD_S:
            self._since, self._logged = now, {True: 0, False: 0}
        if self._logged[failed] < MAX_PER_PERIOD:
            self._logged[failed] += 1
            logger.log(logging.WARNING if failed else logging.INFO, "request", extra=dict(event))
            return
        self.left_out[str(event["status"] or event["outcome"])] += 1
        self._leaves_out.set()

    async def run(self) -> NoReturn:
        """Log, at most once a second, how many events were left out. Cancellation: at once, after logging the rest."""
        try:
            while True:
                await self._leaves_out.wait()
                await trio.sleep(PERIOD_S)
                self._log_left_out()
        finally:
            self._log_left_out()

    def _log_left_out(self) -> None:
        if self.left_out:
            logger.info("requests left out of the access log", extra={"left_out": dict(self.left_out)})
        self.left_out.clear()
        self._leaves_out = trio.Event()

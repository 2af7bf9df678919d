"""The commands that load models: their parameters, read from flags, the environment and a TOML file."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from attrs import evolve, frozen
from cyclopts import App, Group, Parameter
from cyclopts.config import Dict, Env

from trio_pool_serve.command_line.flags import GROUPS, kind_of, settings_of, with_settings
from trio_pool_serve.command_line.other_names import refuse_unknown, translate
from trio_pool_serve.config import Config, ModelTables
from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.config.model_sources import read_toml
from trio_pool_serve.config.network_config import KEY_PASSWORD
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.errors import require
from trio_pool_serve.server.engine_settings import EngineServerConfig

ENVIRONMENT_PREFIX = "TRIO_POOL_SERVE_"

KEYS = frozenset(field.name.replace("_", "-") for group in GROUPS for field, _ in settings_of(kind_of(group)))
"""The settings of a server: the keys of its TOML file, besides the tables of models."""

VARIABLES = KEYS | {"model", "config", "listen", "probe-listen", "measure", "json", "url"}
"""The parameters of all commands that read the environment. A variable of one is ignored by the others."""

KUBERNETES = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_|$)")
"""Variables that Kubernetes sets in every pod for a Service whose name begins with ``trio-pool-serve``."""


@Parameter(name="*", group=Group("Report", sort_key=0))
@frozen(kw_only=True)
class ReportOptions:
    """Contents and format of the report of ``check``."""

    measure: Annotated[bool, help_("Measure speed and memory, which takes a few seconds.")] = True
    json: Annotated[bool, switch("Print the report as JSON.")] = False


@frozen(kw_only=True)
class CheckSettings:
    """The settings of a server that would load the model, and the options of the report."""

    config: Config
    report: ReportOptions


REPORT = ReportOptions()
NO_TABLES = ModelTables()

LAST_COUNTS = Parameter(allow_repeating=True)
"""The last value counts if a flag with one value is given twice; flags with several values collect them."""

SERVING = Group("Servers", sort_key=0)
TOOLS = Group("Tools", sort_key=2)

MODEL_HELP = "Model to {}: a local folder or the id of a model on the Hugging Face hub, or NAME=MODEL."


def serve(
    model: Annotated[
        tuple[str, ...],
        Parameter(
            help="Local folder or id on the Hugging Face hub, or NAME=MODEL. The first model serves requests that "
            "name no model.",
            negative=(),
            show_default=False,
        ),
    ] = (),
    *,
    config: Annotated[  # noqa: ARG001  (``read_settings`` reads the file)
        Path | None,
        Parameter(
            help="TOML file with settings, named like the flags, and tables [models.NAME] for settings of one model."
        ),
    ] = None,
    tables: Annotated[ModelTables, Parameter(parse=False)] = NO_TABLES,
    **settings: Any,
) -> Config:
    """Serve models until SIGTERM or SIGINT.

    A setting is a flag, else a variable such as `TRIO_POOL_SERVE_DTYPE`, else a key of the file of `--config`. Sizes
    and times take units: `16MiB`, `30s`.
    """
    return Config(models=model, tables=tables, **settings)


def engine(
    model: Annotated[str, Parameter(help=MODEL_HELP.format("compute"))],
    *,
    listen: Annotated[
        str,
        Parameter(help="Address to listen on for API processes, `HOST:PORT`; use a private network."),
    ],
    probe_listen: Annotated[
        str | None, Parameter(help="Address for `/livez`, `/readyz` and `/metrics` over HTTP, without a key.")
    ] = None,
    **settings: Any,
) -> EngineServerConfig:
    """Compute a model for servers on other machines, started with `serve --engine-hosts`, until SIGTERM."""
    config = Config(models=(model,), **{**settings, "processes": evolve(settings["processes"], engine="local")})
    require(
        config.hosts.key_file is not None,
        "--key-file is missing. An engine accepts connections only from servers with its key.",
        ValueError,
    )
    return EngineServerConfig(
        config=config,
        listen=HostAddress.parse(listen),
        probe_listen=None if probe_listen is None else HostAddress.parse(probe_listen),
    )


def check(
    model: Annotated[str, Parameter(help=MODEL_HELP.format("check"))],
    *,
    config: Annotated[  # noqa: ARG001  (``read_settings`` reads the file)
        Path | None, Parameter(help="TOML file of `serve`. Settings that `check` does not use are ignored.")
    ] = None,
    report: ReportOptions = REPORT,
    **settings: Any,
) -> CheckSettings:
    """Report whether `serve` can serve a model, and how; its speed on this machine, and its memory.

    The exit status is 1 if the model cannot be served.
    """
    return CheckSettings(config=Config(models=(model,), **settings), report=report)


def convert(model: Annotated[str, Parameter(help=MODEL_HELP.format("convert"))], **settings: Any) -> Config:
    """Convert a model for CPU before its first start, and print which backend was chosen and why.

    Use the same flags as for `serve`, such as `--dtype`, `--backend`, `--pooling` and `--cache-dir`.
    """
    return Config(models=(model,), **settings)


ENGINE_SETTINGS = (
    "processes.replicas", "processes.plugins", "hosts.key_file", "hosts.zone", "time_limits.drain_timeout_s",
    "input.enable_prompt_embeds",
)  # fmt: skip

COMMANDS: Mapping[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "serve": (serve, tuple(GROUPS)),
    "engine": (engine, ("loading", "scheduling", "logging", *ENGINE_SETTINGS)),
    "convert": (convert, ("loading", "processes.plugins", "processes.replicas")),
    "check": (check, ("loading", "scheduling", "processes", "threads", "input")),
}
"""The commands, each with its groups of settings, or single settings."""


def add_server_commands(app: App, *, shows_all: bool = False) -> None:
    """Add the commands to an app. ``shows_all``: its help shows all settings, otherwise only the common ones."""
    more = "" if shows_all else "`--help-all` lists all settings; docs/settings.md explains them."
    for name, (command, groups) in COMMANDS.items():
        heading = TOOLS if name in ("check", "convert") else SERVING
        usage = f"trio-pool-serve {name} {'[MODEL...]' if name == 'serve' else 'MODEL'} [OPTIONS]"
        settable = with_settings(command, groups, shows_all=shows_all)
        app.command(settable, usage=usage, help_epilogue=more, group=heading, sort_key=tuple(COMMANDS).index(name))


def read_settings(command_name: str, arguments: Sequence[str]) -> Any:
    """Return the settings of a command from its flags, the environment, the TOML file and defaults, in this order.

    Raises ``CycloptsError``, ``ValueError`` or ``OSError`` (the file) with a message for the user.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    given |= {f"argument {number}": argument for number, argument in enumerate(arguments, 1)}
    if wrong := [name for name, value in given.items() if re.search("[\udc80-\udcff]", value)]:
        raise ValueError(f"{wrong[0]} is not UTF-8; names and paths have to be.")  # without the value: it may be a key
    tokens = translate(arguments)
    _refuse_unknown_variables()
    sources: list[Env | Dict] = [Env(ENVIRONMENT_PREFIX, command=False)]
    is_serve, path = command_name == "serve", _toml_path(tokens)
    tables = NO_TABLES
    if path is not None and command_name != "engine":
        settings, tables = read_toml(path)
        if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
            raise ValueError(f"{path}: [{nested[0]}] is not a table of this file; write settings at its beginning.")
        refuse_unknown(settings, lambda name: f"{path}: {name}", KEYS | {"model"})
        # Other commands ignore the settings of a server's file that they do not use.
        sources.append(Dict(settings, source=path, use_commands_as_keys=False, allow_unknown=not is_serve))
    reader = App(config=sources, default_parameter=LAST_COUNTS)
    reader.default(with_settings(*COMMANDS[command_name]))
    command, bound, _ = reader.parse_args(tokens, print_error=False, exit_on_error=False)
    return command(*bound.args, **bound.kwargs, **({"tables": tables} if is_serve else {}))


def _refuse_unknown_variables() -> None:
    names = [
        name.removeprefix(ENVIRONMENT_PREFIX)
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name != KEY_PASSWORD and not value.startswith("tcp://")
    ]
    if lower := [name for name in names if name != name.upper()]:
        raise ValueError(f"{ENVIRONMENT_PREFIX}{lower[0]} is not a setting: names of variables are in capitals.")
    refuse_unknown(
        [name for name in names if not KUBERNETES.search(name)],
        lambda name: ENVIRONMENT_PREFIX + name.upper().replace("-", "_"),
        VARIABLES,
    )


def _toml_path(tokens: Sequence[str]) -> str | None:
    path = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG") or None
    for token, following in pairwise((*tokens, "")):
        if token == "--config" and following:  # noqa: S105  (a flag)
            path = following
        if token.startswith("--config="):
            path = token.removeprefix("--config=")
    return path

"""The commands that load models: their parameters, read from flags, the environment and a TOML file."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from attrs import evolve, frozen
from cyclopts import App, Group, Parameter
from cyclopts.config import Dict, Env

from trio_pool_serve.command_line.flags import GROUPS, with_settings
from trio_pool_serve.command_line.other_names import refuse_unknown, translate
from trio_pool_serve.config import Config, ModelTables
from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.config.model_sources import read_toml
from trio_pool_serve.config.network_config import KEY_PASSWORD
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.server.engine_settings import EngineServerConfig

ENVIRONMENT_PREFIX = "TRIO_POOL_SERVE_"


@Parameter(name="*", group=Group("Report", sort_key=0))
@frozen(kw_only=True)
class ReportOptions:
    """Contents and format of the report of ``check``."""

    measure: Annotated[
        bool, help_("Compute rows of several lengths and the largest batch, for speed and memory: a few seconds.")
    ] = True
    json: Annotated[bool, switch("Print the report as JSON.")] = False


@frozen(kw_only=True)
class CheckSettings:
    """The settings of a server that would load the model, and the options of the report."""

    config: Config
    report: ReportOptions


REPORT = ReportOptions()
NO_TABLES = ModelTables()

MODEL_HELP = "Model to {}: a local folder or the id of a model on the Hugging Face hub, or NAME=MODEL."


def serve(
    model: Annotated[
        tuple[str, ...],
        Parameter(
            help="Local folder or id on the Hugging Face hub, or NAME=MODEL. The first of several models serves "
            "requests that name none.",
            negative=(),
            show_default=False,
        ),
    ] = (),
    *,
    config: Annotated[  # noqa: ARG001  (``read_settings`` reads the file)
        Path | None,
        Parameter(
            help="TOML file with settings by flag name, and tables [models.NAME] of models with settings of their own."
        ),
    ] = None,
    tables: Annotated[ModelTables, Parameter(parse=False)] = NO_TABLES,
    **settings: Any,
) -> Config:
    """Serve models until SIGTERM or SIGINT.

    Settings are flags, variables such as `TRIO_POOL_SERVE_DTYPE`, or keys of `--config`, the first found. Sizes and
    times take units: `16MiB`, `30s`.
    """
    return Config(models=model, tables=tables, **settings)


def engine(
    model: Annotated[str, Parameter(help=MODEL_HELP.format("compute"))],
    *,
    listen: Annotated[
        str,
        Parameter(help="Address to listen on for API processes, `HOST:PORT`, in a network of their own."),
    ],
    probe_listen: Annotated[
        str | None, Parameter(help="Address for `/livez`, `/readyz` and `/metrics` over HTTP, without a key.")
    ] = None,
    **settings: Any,
) -> EngineServerConfig:
    """Compute a model for API processes on other machines, which `serve --engine-hosts` starts, until SIGTERM."""
    config = Config(models=(model,), **{**settings, "processes": evolve(settings["processes"], engine="local")})
    if config.hosts.key_file is None:
        raise ValueError("--key-file is missing: an engine accepts connections only from holders of its key.")
    return EngineServerConfig(
        config=config,
        listen=HostAddress.parse(listen),
        probe_listen=None if probe_listen is None else HostAddress.parse(probe_listen),
    )


def check(
    model: Annotated[str, Parameter(help=MODEL_HELP.format("check"))],
    *,
    config: Annotated[  # noqa: ARG001  (``read_settings`` reads the file)
        Path | None, Parameter(help="TOML file of `serve`. Settings that do not matter here are ignored.")
    ] = None,
    report: ReportOptions = REPORT,
    **settings: Any,
) -> CheckSettings:
    """Show whether and how `serve` would serve a model, how fast it is here and how much memory it takes.

    The exit status is 1 if it cannot be served.
    """
    return CheckSettings(config=Config(models=(model,), **settings), report=report)


def convert(model: Annotated[str, Parameter(help=MODEL_HELP.format("convert"))], **settings: Any) -> Config:
    """Convert a model for CPU before its first start, and show which backend was chosen and why.

    Give the settings of `serve` that matter: `--dtype`, `--backend`, `--pooling`, `--cache-dir`.
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
    more = "" if shows_all else "`--help-all` lists all settings, docs/settings.md explains them."
    for name, (command, groups) in COMMANDS.items():
        usage = f"trio-pool-serve {name} {'[MODEL...]' if name == 'serve' else 'MODEL'} [OPTIONS]"
        app.command(with_settings(command, groups, shows_all=shows_all), usage=usage, help_epilogue=more)


def read_settings(command_name: str, arguments: Sequence[str]) -> Any:
    """Return the settings of a command from its flags, the environment, the TOML file and defaults, in this order.

    Raises ``CycloptsError``, ``ValueError`` or ``OSError`` (the file) with a message for the user.
    """
    tokens = translate(arguments)
    variables = {name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)} - {KEY_PASSWORD}
    refuse_unknown(
        [name.removeprefix(ENVIRONMENT_PREFIX) for name in sorted(variables)],
        lambda name: ENVIRONMENT_PREFIX + name.upper().replace("-", "_"),
    )
    sources: list[Env | Dict] = [Env(ENVIRONMENT_PREFIX, command=False)]
    is_serve, path = command_name == "serve", _toml_path(tokens)
    tables = NO_TABLES
    if path is not None and command_name != "engine":
        settings, tables = read_toml(path)
        refuse_unknown(settings, lambda name: f"{path}: {name}")
        # Other commands ignore the settings of a server's file that they do not use.
        sources.append(Dict(settings, source=path, use_commands_as_keys=False, allow_unknown=not is_serve))
    reader = App(config=sources)
    reader.default(with_settings(*COMMANDS[command_name]))
    command, bound, _ = reader.parse_args(tokens, print_error=False, exit_on_error=False)
    return command(*bound.args, **bound.kwargs, **({"tables": tables} if is_serve else {}))


def _toml_path(tokens: Sequence[str]) -> str | None:
    for index, token in enumerate(tokens):
        if token == "--config" and index + 1 < len(tokens):  # noqa: S105  (a flag)
            return tokens[index + 1]
        if token.startswith("--config="):
            return token.removeprefix("--config=")
    return os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG") or None

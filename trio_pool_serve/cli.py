"""The ``trio-pool-serve`` command."""

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict, Env
from rich.console import Console

import trio_pool_serve
from trio_pool_serve.access.api_keys import ApiKeys
from trio_pool_serve.bulk.commands import COMMANDS, add_commands, leave_with
from trio_pool_serve.checking.check_settings import CheckSettings, ReportOptions
from trio_pool_serve.config import (
    BatchConfig,
    Config,
    HostsConfig,
    InputConfig,
    LoggingConfig,
    ModelChangesConfig,
    ModelConfig,
    ModelTables,
    NetworkConfig,
    ProcessesConfig,
    RayConfig,
    SchedulingConfig,
    ThreadsConfig,
    TimeLimitsConfig,
    import_plugins,
)
from trio_pool_serve.config.model_sources import read_toml
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.engine.remote.engine_hosts import read_hosts
from trio_pool_serve.engine.remote.keys import LinkKeys
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, innermost
from trio_pool_serve.load.bench_command import bench
from trio_pool_serve.server.engine_settings import EngineServerConfig
from trio_pool_serve.server.hosts_command import hosts_app
from trio_pool_serve.telemetry.logs import configure_logging
from trio_pool_serve.telemetry.tracing import is_switched_on

if TYPE_CHECKING:
    from trio_pool_serve.service import RunnerLoader, Service

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "TRIO_POOL_SERVE_"

DEFAULTS = Config(models=("default",))
REPORT = ReportOptions()

app = App(
    name="trio-pool-serve",
    help="A server for pooling models, built on structured concurrency.",
    version=trio_pool_serve.__version__,
)
add_commands(app)
app.command(bench)
app.command(hosts_app)

settings_app = App(name="trio-pool-serve")
"""Reads the settings of ``serve`` and ``check``: in a file, a key with a command's name would be no setting."""


@settings_app.command
@app.command
def serve(
    model: Annotated[
        tuple[str, ...],
        Parameter(
            help="Model to serve: a local folder or the id of a model on the Hugging Face hub. NAME=MODEL sets its "
            "name in the API. Of several models, the first is used for requests that name none.",
            negative=(),
            show_default=lambda _: "the tables [models.NAME] of `--config`",
        ),
    ] = (),
    *,
    config: Annotated[
        Path | None,
        Parameter(
            help="TOML file with settings by flag name, over which flags and environment variables take precedence, "
            "and a table [models.NAME] for each model with settings of its own."
        ),
    ] = None,
    tables: Annotated[ModelTables, Parameter(parse=False)] = DEFAULTS.tables,
    loading: ModelConfig = DEFAULTS.loading,
    network: NetworkConfig = DEFAULTS.network,
    scheduling: SchedulingConfig = DEFAULTS.scheduling,
    processes: ProcessesConfig = DEFAULTS.processes,
    hosts: HostsConfig = DEFAULTS.hosts,
    ray: RayConfig = DEFAULTS.ray,
    threads: ThreadsConfig = DEFAULTS.threads,
    time_limits: TimeLimitsConfig = DEFAULTS.time_limits,
    inputs: InputConfig = DEFAULTS.input,
    log: LoggingConfig = DEFAULTS.logging,
    batch: BatchConfig = DEFAULTS.batch,
    model_changes: ModelChangesConfig = DEFAULTS.model_changes,
) -> Config:
    """Serve models until SIGTERM or SIGINT."""
    del config  # ``read_config`` reads the file
    return Config(
        models=model,
        tables=tables,
        loading=loading,
        network=network,
        scheduling=scheduling,
        processes=processes,
        hosts=hosts,
        ray=ray,
        threads=threads,
        time_limits=time_limits,
        input=inputs,
        logging=log,
        batch=batch,
        model_changes=model_changes,
    )


@app.command(name="engine")
def engine_command(
    model: Annotated[
        str,
        Parameter(help="Model to compute: a local folder or the id of a model on the Hugging Face hub, or NAME=MODEL."),
    ],
    *,
    listen: Annotated[
        str,
        Parameter(help="Address to listen on for API processes, `HOST:PORT`: of a network that only they reach."),
    ],
    key_file: Annotated[Path, Parameter(help="File with the secret key, as for `serve --engine-hosts`.")],
    zone: Annotated[str, Parameter(help="The zone of this machine.")] = "",
    probe_listen: Annotated[
        str | None, Parameter(help="Address for HTTP: `/livez`, `/readyz` and `/metrics`. It needs no key.")
    ] = None,
    replicas: Annotated[
        int | None,
        Parameter(
            help="Number of batches computed at a time, each in a thread of its own.",
            show_default=lambda _: "1 on a GPU; on CPU one per core, at most 4",
        ),
    ] = None,
    drain_timeout_s: Annotated[
        float, Parameter(help="Maximum duration in seconds of the shutdown, in which what was sent is computed.")
    ] = 30.0,
    plugins: Annotated[str, Parameter(help="Comma-separated Python modules to import first, as for `serve`.")] = "",
    loading: ModelConfig = DEFAULTS.loading,
    scheduling: SchedulingConfig = DEFAULTS.scheduling,
    log: LoggingConfig = DEFAULTS.logging,
) -> EngineServerConfig:
    """Compute a model for API processes on other machines, which `serve --engine-hosts` starts, until SIGTERM."""
    processes = ProcessesConfig(engine="local", replicas=replicas, plugins=plugins)
    config = Config(
        models=(model,),
        loading=loading,
        scheduling=scheduling,
        processes=processes,
        hosts=HostsConfig(key_file=key_file, zone=zone),
        logging=log,
    )
    return EngineServerConfig(
        config=config,
        listen=HostAddress.parse(listen),
        probe_listen=None if probe_listen is None else HostAddress.parse(probe_listen),
        drain_timeout_s=drain_timeout_s,
    )


@settings_app.command
@app.command
def check(
    model: Annotated[
        str,
        Parameter(help="Model to check: a local folder or the id of a model on the Hugging Face hub, or NAME=MODEL."),
    ],
    *,
    config: Annotated[
        Path | None, Parameter(help="TOML file of `serve`. Settings that do not matter here are ignored.")
    ] = None,
    report: ReportOptions = REPORT,
    loading: ModelConfig = DEFAULTS.loading,
    scheduling: SchedulingConfig = DEFAULTS.scheduling,
    processes: ProcessesConfig = DEFAULTS.processes,
    threads: ThreadsConfig = DEFAULTS.threads,
    inputs: InputConfig = DEFAULTS.input,
) -> CheckSettings:
    """Say whether and how `serve` would serve a model, how fast it is here and what memory it takes.

    The exit status is 1 if it cannot be served.
    """
    del config  # ``read_settings`` reads the file
    checked = Config(
        models=(model,), loading=loading, scheduling=scheduling, processes=processes, threads=threads, input=inputs
    )
    return CheckSettings(config=checked, report=report)


@app.command
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell: bash, zsh or fish.")],
) -> int:
    """Print a script by which a shell completes commands, flags and their values."""
    print(app.generate_completion(shell=shell))
    return 0


def run_engine(settings: EngineServerConfig, load_runner: "RunnerLoader | None" = None) -> int:
    """Compute one model for API processes on other machines until stopped; return the exit status."""
    # Imported here, after the settings have been validated: it takes seconds.
    from trio_pool_serve.server.engine_server import serve_engine_alone
    from trio_pool_serve.service import load_transformer

    try:
        import_plugins(settings.config)
        if settings.config.hosts.key_file is not None:
            LinkKeys(settings.config.hosts.key_file).read()
    except (ValueError, OSError) as error:
        _print_error(error)
        return 2
    configure_logging(settings.config.logging)
    return _run_until_stopped(serve_engine_alone, settings, load_runner or load_transformer)


def read_config(arguments: Sequence[str]) -> Config:
    """Return the settings for ``serve``: from flags, the environment, the TOML file and defaults, in this order.

    Raises ``CycloptsError``, ``ValueError`` or ``OSError`` (the file) with a message for the user.
    """
    settings: Config = _read_settings("serve", arguments)
    return settings


def _read_settings(command_name: str, arguments: Sequence[str]) -> Any:
    """Return what a command of ``settings_app`` returns for settings of all sources. Raises as ``read_config``."""
    tokens = list(arguments)
    sources: list[Env | Dict] = [Env(ENVIRONMENT_PREFIX, command=False)]
    is_serve, path = command_name == "serve", _toml_path(tokens)
    tables = ModelTables()
    if path is not None:
        settings, tables = read_toml(path)
        sources.append(Dict(settings, source=path, use_commands_as_keys=False, allow_unknown=not is_serve))
    settings_app.config = sources
    command, bound, _ = settings_app.parse_args([command_name, *tokens], print_error=False, exit_on_error=False)
    return command(*bound.args, **bound.kwargs, **({"tables": tables} if is_serve else {}))


def check_references(config: Config) -> None:
    """Check what settings refer to: files and extras. Raises ``ValueError`` or ``OSError``. Blocking."""
    is_switched_on()
    keys = ApiKeys.of(config)
    keys.read_file()
    if config.model_changes.model_api and not keys.are_needed:
        raise ValueError("--model-api requires --api-key or --api-keys-file: otherwise any client could load models.")
    if config.processes.engine == "ray" and find_spec("ray") is None:
        raise ValueError("--engine ray needs the extra [ray]: pip install trio-pool-serve[ray]")
    if config.processes.replicas_per_gpu is not None and not has_gpu(config.loading):
        raise ValueError(f"--replicas {config.processes.replicas} needs a GPU; on CPU give a number, such as 2.")
    computes_here = config.processes.engine not in ("hosts", "ray") and not config.hosts.engine_hosts
    is_int8 = any(source.loading.dtype == "int8" for source in config.sources)
    if is_int8 and computes_here and find_spec("nncf") is None:
        raise ValueError("--dtype int8 needs the extra [int8]: pip install trio-pool-serve[int8]")
    if config.processes.engine == "hosts" and not config.hosts.engine_hosts:
        raise ValueError("--engine hosts requires --engine-hosts.")
    if config.hosts.engine_hosts:
        if config.hosts.key_file is None:
            raise ValueError("--engine-hosts requires --key-file: an engine computes only for who has its key.")
        LinkKeys(config.hosts.key_file).read()
        read_hosts(config.hosts.engine_hosts)


def _toml_path(tokens: Sequence[str]) -> str | None:
    for index, token in enumerate(tokens):
        if token == "--config" and index + 1 < len(tokens):  # noqa: S105  (a flag)
            return tokens[index + 1]
        if token.startswith("--config="):
            return token.removeprefix("--config=")
    return os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")


def _run_until_stopped(serve: Callable[..., Awaitable[None]], *arguments: object) -> int:
    """Return the exit status: 0 if ``serve`` has ended without an error, which is logged otherwise."""
    try:
        trio.run(serve, *arguments)
    except Exception as error:
        cause = innermost(error)
        if isinstance(cause, ModelLoadError | EngineDeadError | OSError):
            _print_error(cause)
        else:
            logger.critical("the server has failed", exc_info=error)
        return 1
    return 0


def run(config: Config, service: "Service | None" = None, load_runner: "RunnerLoader | None" = None) -> int:
    """Serve until stopped; return the exit status, 0 only after a drain that a signal has started."""
    # Imported here, after the settings have been validated: it takes seconds.
    from trio_pool_serve.server.launcher import serve as serve_until_stopped
    from trio_pool_serve.service import load_transformer

    configure_logging(config.logging)
    return _run_until_stopped(serve_until_stopped, config, service, load_runner or load_transformer)


def run_check(arguments: Sequence[str]) -> int:
    """Check a model with the settings of ``arguments``; return the exit status."""
    try:
        settings = _read_settings("check", arguments)
        import_plugins(settings.config)
    except (CycloptsError, ValueError, OSError) as error:
        _print_error(error)
        return 2
    # Imported here, after the settings have been validated: it takes seconds.
    from trio_pool_serve.checking.check_model import run_check as check_and_print

    return check_and_print(settings)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    asks_for_help = bool({"--help", "-h"} & set(arguments))
    if arguments[:1] == ["check"] and not asks_for_help:
        leave_with(run_check(arguments[1:]))
    if arguments[:1] != ["serve"] or asks_for_help:
        # The variables are the server's: --dtype of embed is another setting than that of serve.
        app.config = (
            [] if arguments[:1] and arguments[0] in (*COMMANDS, "bench") else [Env(ENVIRONMENT_PREFIX, command=False)]
        )
        try:
            command, bound, _ = app.parse_args(arguments)
            engine = engine_command(*bound.args, **bound.kwargs) if command is engine_command else None
        except ValueError as error:  # of a check of several options together
            _print_error(error)
            sys.exit(2)
        status = command(*bound.args, **bound.kwargs) if engine is None else run_engine(engine)
        if isinstance(status, int):  # not that of --help
            leave_with(status)
        sys.exit(0)
    try:
        config = read_config(arguments[1:])
        import_plugins(config)
        check_references(config)
    except (CycloptsError, ValueError, OSError) as error:
        _print_error(error)
        sys.exit(2)
    leave_with(run(config))  # what libraries do at the end of a process can hang


def _print_error(error: Exception) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    # Validators of attrs add the attribute and more to their message.
    message = error.args[0] if isinstance(error, ValueError) and len(error.args) > 1 else error
    console.print(f"trio-pool-serve: {message}", style="red", markup=False)

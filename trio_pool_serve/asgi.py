"""The app for ``hypercorn --worker-class trio trio_pool_serve.asgi:app``, configured by the environment."""

from trio_pool_serve.app import create_app
from trio_pool_serve.cli import configure_logging, read_config
from trio_pool_serve.containment import contain_connections

contain_connections()
_config = read_config([])
configure_logging(_config.logging.log_level)
app = create_app(_config)

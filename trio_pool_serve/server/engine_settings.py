"""Settings of ``trio-pool-serve engine``."""

from attrs import frozen

from trio_pool_serve.config import Config
from trio_pool_serve.engine.remote.connectors import HostAddress


@frozen(kw_only=True)
class EngineServerConfig:
    """Where an engine listens for API processes, and with ``probe_listen`` for HTTP; ``config`` has its one model's."""

    config: Config
    listen: HostAddress
    probe_listen: HostAddress | None = None

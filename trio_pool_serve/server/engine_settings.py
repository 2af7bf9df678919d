"""Settings of ``trio-pool-serve engine``."""

from attrs import frozen

from trio_pool_serve.config import Config
from trio_pool_serve.engine.remote.connectors import HostAddress


@frozen(kw_only=True)
class EngineServerConfig:
    """The addresses at which an engine listens for API processes and for HTTP probes; ``config`` has its one model."""

    config: Config
    listen: HostAddress
    probe_listen: HostAddress | None = None

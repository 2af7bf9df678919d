"""A plugin: the access log leaves out no request."""

from trio_pool_serve.telemetry import logs

logs.MAX_PER_PERIOD = 100_000

"""A plugin: the access log leaves out no request."""

from trio_pool_serve.telemetry import access_log

access_log.MAX_PER_PERIOD = 100_000

"""The listener on the socket of a server, which is restarted when it crashes."""

import logging
import resource
import socket
from collections.abc import Awaitable, Callable

import trio
from hypercorn.config import Config as HypercornConfig

from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config
from trio_pool_serve.processes.restart_backoff import RestartBackoff
from trio_pool_serve.server.acceptor import serve_app
from trio_pool_serve.server.server_context import ConnectionLimits, Connections, ServerContext
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.service import Service

logger = logging.getLogger(__name__)

RESTART_PAUSES_S = (0.0, 0.01, 0.05, 0.1, 0.25)
"""Well under a second: the models are loaded and the socket is open, so clients only wait."""

STABLE_AFTER_S = 10.0

RESERVED_FILES = 256
"""File descriptors that are not for connections, refused ones included: they are for models, child processes, uploads,
images that are fetched. At most half of all."""


def hypercorn_config(config: Config) -> HypercornConfig:
    """Return hypercorn's settings for the connections of a listener."""
    settings = HypercornConfig()
    settings.graceful_timeout = config.time_limits.drain_timeout_s
    settings.keep_alive_timeout = 75
    settings.keep_alive_max_requests = 1_000_000  # the default of 1000 closes busy connections
    settings.include_server_header = False
    settings.errorlog = logging.getLogger("hypercorn.error")
    return settings


async def serve_listeners(
    config: Config, service: Service, listening: socket.socket, stop: trio.Event, tls: Certificates | None = None
) -> None:
    """Serve on the socket until ``stop`` is set, and drain then; with a new listener whenever one crashes.

    Each listener has an app of its own.

    Cancellation: at once, but for what hypercorn is writing.
    """
    settings = hypercorn_config(config)
    connections = connections_of(service)
    backoff = RestartBackoff(RESTART_PAUSES_S, STABLE_AFTER_S)
    while not stop.is_set():
        began = trio.current_time()
        try:
            # A new app each time: one cannot start twice.
            app, context = create_app(config, service), ServerContext(connections=connections)
            await serve_app(app, settings, context, listening, stop, tls=tls, refusing=app)
        except Exception as error:
            service.metrics.listener_restarts.inc()
            logger.warning("the listener crashed; it restarts", exc_info=error)
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))


def connections_of(service: Service) -> Connections:
    """Return the count of a process's connections, with its limits; the service's metrics show it."""
    metrics = service.metrics
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = files - min(RESERVED_FILES, files // 2)
    max_refused = min(ConnectionLimits().max_refused, room // 8)
    limits = ConnectionLimits(
        client_timeout_s=service.config.time_limits.client_timeout_s,
        max_connections=max(1, min(ConnectionLimits().max_connections, room - max_refused)),
        max_refused=max_refused,
    )
    connections = Connections(limits, metrics.connections_refused.inc)
    metrics.add_gauges(lambda: {"connections": {"open": connections.open, "limit": limits.max_connections}})
    return connections


async def drain(service: Service, stop: trio.Event, wait_for_more: Callable[[], Awaitable[str]]) -> None:
    """Refuse new requests, those on new connections too, and wait while running ones finish.

    Returns when that takes longer than ``--drain-timeout-s`` or ``wait_for_more()`` returns a reason to exit at once.

    The caller exits then; it is cancelled when all requests have finished. Cancellation: at once.
    """
    limit_s = service.config.time_limits.drain_timeout_s
    logger.info("draining, for at most %g s", limit_s)
    service.draining = True
    stop.set()
    reason = "the drain took too long"
    with trio.move_on_after(limit_s):
        reason = await wait_for_more()
    # hypercorn shields its writes: a client that does not read would keep the process alive for ever.
    logger.warning(
        "exiting with %d rows unfinished: %s",
        sum(served.engine.statistics().queued_rows for served in service.served.values()),
        reason,
    )

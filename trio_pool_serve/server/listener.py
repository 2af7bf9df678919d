"""The listener of ``trio-pool-serve serve``: accepts connections, runs the app's lifespan, and restarts after a crash.

hypercorn's own listener closes its socket as soon as a shutdown begins. This one accepts connections until the running
requests are answered: new clients get 503 instead of being refused by the kernel. It also refuses connections above the
limits before anything is spent on them.
"""

import logging
import socket
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.lifespan import Lifespan
from hypercorn.typing import LifespanState
from hypercorn.utils import wrap_app

from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config
from trio_pool_serve.processes.child_process import RestartBackoff
from trio_pool_serve.server.acceptor import Acceptor
from trio_pool_serve.server.contained_connection import serve_connection
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import Connections, ServerContext
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.service import Service

logger = logging.getLogger(__name__)

RESTART_PAUSES_S = (0.0, 0.01, 0.05, 0.1, 0.25)
"""Pauses before restarts, well under a second: models are loaded and the socket is open, so clients only wait."""

STABLE_AFTER_S = 10.0


async def serve_app(
    app: Any,
    settings: HypercornConfig,
    context: ServerContext,
    listening: socket.socket,
    stop: trio.Event,
    *,
    tls: Certificates | None = None,
) -> None:
    """Serve an app on a listening socket until ``stop`` is set and all requests running at that time are answered.

    Connections accepted after ``stop`` are served for one request each. Running requests get
    ``settings.graceful_timeout`` seconds. Cancellation: at once, except for hypercorn's writes.
    """
    state: LifespanState = {}
    wrapped = wrap_app(app, settings.wsgi_max_body_size, "asgi")
    lifespan = Lifespan(wrapped, settings, state)
    acceptor = Acceptor(listening, context, partial(serve_connection, wrapped, settings, context, state), tls)
    async with trio.open_nursery() as lifespan_nursery:
        await lifespan_nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        try:
            await _serve_until(stop, acceptor, settings.graceful_timeout)
        finally:
            acceptor.close_refused()  # nothing else owns these sockets
        await lifespan.wait_for_shutdown()
        lifespan_nursery.cancel_scope.cancel(reason="the app has shut down")


async def _serve_until(stop: trio.Event, acceptor: Acceptor, drain_timeout_s: float) -> None:
    """Serve until ``stop`` is set, then until the earlier connections have ended."""

    async def stop_accepting(accepting: trio.CancelScope) -> None:
        await stop.wait()
        accepting.cancel(reason="the server shuts down")

    # ``early`` has the connections that the shutdown waits for, ``late`` the connections accepted meanwhile.
    async with trio.open_nursery() as late, trio.open_nursery() as background:
        async with trio.open_nursery() as early:
            with trio.CancelScope() as accepting:
                background.start_soon(stop_accepting, accepting)
                await acceptor.run(early)
            early.cancel_scope.deadline = late.cancel_scope.deadline = trio.current_time() + drain_timeout_s
            await acceptor.context.terminated.set()
            background.start_soon(acceptor.run, late)  # the app answers their requests with 503
        background.cancel_scope.cancel(reason="all running requests are answered")
        acceptor.accept_rest(late)


def hypercorn_config(config: Config) -> HypercornConfig:
    """Return hypercorn's settings for the connections of a listener."""
    return HypercornConfig.from_mapping(
        # ``drain`` counts the requests that still run, and exits, before they are cancelled.
        graceful_timeout=config.time_limits.drain_timeout_s + 1.0,
        keep_alive_timeout=75,
        keep_alive_max_requests=1_000_000,  # the default of 1000 closes busy connections
        include_server_header=False,
        errorlog=logging.getLogger("hypercorn.error"),
    )


async def serve_listeners(
    service: Service, listening: socket.socket, stop: trio.Event, tls: Certificates | None
) -> None:
    """Serve on the socket until ``stop`` is set, then drain; after a crash, with a new listener and a new app.

    Cancellation: at once, except for hypercorn's writes.
    """
    settings, connections = hypercorn_config(service.config), Connections.of(service)
    backoff = RestartBackoff(RESTART_PAUSES_S, STABLE_AFTER_S)
    while not stop.is_set():
        began = trio.current_time()
        try:
            # A new app each time: one cannot start twice.
            app = create_app(service.config, service)
            context = ServerContext(connections=connections, refusals=RefusalWriter(app.overload, settings))
            await serve_app(app, settings, context, listening, stop, tls=tls)
        except Exception as error:
            service.metrics.listener_restarts.inc()
            logger.warning("the listener crashed; it restarts", exc_info=error)
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))

"""The listener of ``run-batch --enable-metrics``."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.api.routes.operations import PROBE_ROUTES
from trio_pool_serve.app import PoolServeApp, create_app
from trio_pool_serve.config import Config
from trio_pool_serve.server.listener import serve_listeners
from trio_pool_serve.service import Service

ROUTES = PROBE_ROUTES | {("GET", "/metrics")}


@asynccontextmanager
async def serving_metrics(service: Service, listening: socket.socket) -> AsyncIterator[None]:
    """Serve metrics and probes on a socket for as long as the block lasts, and nothing else.

    Cancellation: as the block's. At its end connections are closed at once.
    """
    async with trio.open_nursery() as nursery:
        serve = partial(serve_listeners, create=_create_metrics_app)
        nursery.start_soon(serve, service.config, service, listening, trio.Event())
        yield
        nursery.cancel_scope.cancel(reason="the run has ended")


def _create_metrics_app(config: Config, service: Service) -> PoolServeApp:
    app = create_app(config, service)
    app.routes = RouteTable({route: handler for route, handler in app.routes.routes.items() if route in ROUTES})
    return app

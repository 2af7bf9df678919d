"""The composition root: settings in, an ASGI app out."""

import logging
from collections.abc import Mapping
from typing import Any

import trio
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGILifespan

from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.dialects.registry import DIALECTS
from trio_pool_serve.api.dialects.tei.dialect import TEI
from trio_pool_serve.api.dialects.tei.info import INFO_PATH, tei_routes
from trio_pool_serve.api.http.connection import PoolServeConnection
from trio_pool_serve.api.http.dispatch import candidates_by_path, dialect_handlers
from trio_pool_serve.api.http.exchange import Handler
from trio_pool_serve.api.http.quart_routes import receive_with_quart, view_of
from trio_pool_serve.api.http.received_body import BufferedRequest
from trio_pool_serve.api.http.reception import Reception
from trio_pool_serve.api.routes.models import models_routes
from trio_pool_serve.api.routes.openapi import openapi_routes
from trio_pool_serve.api.routes.operations import operations_routes
from trio_pool_serve.api.routes.probes import probe_handlers
from trio_pool_serve.config import Config
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, innermost
from trio_pool_serve.service import Service, configure_process

logger = logging.getLogger(__name__)


class PoolServeApp(QuartTrio):
    """The routes over a service.

    ``handlers`` are what ``PoolServeConnection`` answers beneath Quart, by method and path. Quart has the same for
    what is asked of their paths in another way, and all other routes.
    """

    asgi_http_class = PoolServeConnection
    request_class = BufferedRequest
    service: Service
    reception: Reception
    handlers: Mapping[tuple[str, str], Handler]


class OwnedServiceLifespan(TrioASGILifespan):
    """The ASGI lifespan with the service's nursery around it.

    Around, and not inside: a crash in ``app.nursery`` leaves a server that goes on answering, and a
    ``while_serving`` generator that yields inside a nursery corrupts trio's stack when a child crashes.
    """

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run the service for as long as the server lives; if it fails, take the server along."""
        service = self.app.service  # type: ignore[attr-defined]
        failure: BaseException | None = None
        configure_process(service)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await super().__call__(receive, send)
                nursery.cancel_scope.cancel(reason="the server has shut down")
        except* (ModelLoadError, EngineDeadError) as group:
            failure = innermost(group)
        if failure is not None:
            logger.critical("%s", failure)
            # The one message after start-up that makes the server's worker exit.
            await send({"type": "lifespan.shutdown.failed", "message": str(failure)})


def create_app(config: Config, service: Service | None = None) -> PoolServeApp:
    """Return the app over ``service``, which somebody else runs; or over one of its own.

    Without ``service`` the app's lifespan loads the model and runs the engine: what a plain ASGI server
    needs. Raises nothing that depends on the model: that is loaded once the server is up.
    """
    app = PoolServeApp(__name__)
    app.service = service or Service(config)
    if service is None:
        app.asgi_lifespan_class = OwnedServiceLifespan
    app.config["MAX_CONTENT_LENGTH"] = config.network.max_body_bytes
    app.config["RESPONSE_TIMEOUT"] = None  # hypercorn's writes cannot be cancelled: --write-timeout-s ends them
    by_path = {
        path: [candidate.dialect for candidate in candidates]
        for path, candidates in candidates_by_path(DIALECTS).items()
    }
    by_path[INFO_PATH] = [TEI]
    app.reception = Reception(app.service, default=OPENAI, by_path=by_path)
    receive_with_quart(app, app.reception)
    tasks, probes = dialect_handlers(app.service, DIALECTS), probe_handlers(app.service)
    app.handlers = {("POST", path): handler for path, handler in tasks.items()} | {
        ("GET", path): handler for path, handler in probes.items()
    }
    for (method, path), handler in app.handlers.items():
        app.add_url_rule(path, endpoint=f"{method} {path}", view_func=view_of(handler), methods=[method])
    app.register_blueprint(operations_routes(app.service))
    app.register_blueprint(models_routes(app.service))
    app.register_blueprint(openapi_routes(DIALECTS))
    app.register_blueprint(tei_routes(app.service))
    return app

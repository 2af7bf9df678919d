"""The composition root: settings in, an ASGI app out."""

from typing import Any, NoReturn

import trio
from quart import Blueprint, Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGILifespan
from werkzeug.exceptions import HTTPException

from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.dialects.ollama import OLLAMA
from trio_pool_serve.api.dialects.open_inference import OPEN_INFERENCE
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.dialects.tei import TEI
from trio_pool_serve.api.http.connection import PoolServeConnection
from trio_pool_serve.api.http.endpoint_choice import endpoints_by_path
from trio_pool_serve.api.http.forwarding import serve_forwarded
from trio_pool_serve.api.http.line_responder import LineResponder
from trio_pool_serve.api.http.middleware import Middleware
from trio_pool_serve.api.http.overload import OverloadGate, errors_agree
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.api.http.task_handler import TaskHandler, task_routes
from trio_pool_serve.api.routes.adapters import ADAPTER_CHANGES, adapter_change_routes
from trio_pool_serve.api.routes.batches import batch_routes
from trio_pool_serve.api.routes.console import LIVE_PATH, OPEN_ROUTES, console_routes
from trio_pool_serve.api.routes.discovery import V2_MODEL, V2_READY, discovery_routes
from trio_pool_serve.api.routes.models import INFO_PATH, MODEL_CHANGES, model_change_routes, model_routes
from trio_pool_serve.api.routes.ollama_models import PATHS, ollama_routes
from trio_pool_serve.api.routes.openapi import openapi_routes
from trio_pool_serve.api.routes.operations import (
    ADMIN_PATHS,
    HOST_ROUTES,
    MONITORED_PATHS,
    PROBE_ROUTES,
    host_routes,
    operational_routes,
)
from trio_pool_serve.api.routes.stored_files import file_routes
from trio_pool_serve.config import Config
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.process_setup import configure_process
from trio_pool_serve.processes.child_process import end_hypercorn
from trio_pool_serve.runs.batch_api.batch_runner import LineRoutes
from trio_pool_serve.service import Service

NOT_TRIO = "This app needs trio: run hypercorn with --worker-class trio. Other servers cannot serve it."

MODEL_SUFFIXES = frozenset(
    suffix for dialect in DIALECTS for endpoint in dialect.endpoints for suffix in endpoint.model_suffixes
)
"""Of all endpoints: lines of a batch, which are for one model, may name it with them."""

BLUEPRINTS: list[Blueprint] = []
"""Quart blueprints with the routes of plugins; every app serves them."""


class PoolServeApp(QuartTrio):
    """The ASGI app over a service. All routes of the server are in ``routes``, none are Quart's.

    Quart handles all other paths: routes and blueprints that users register on the app, and 404. It does not handle
    exceptions; the middleware turns them into responses.
    """

    asgi_http_class = PoolServeConnection
    service: Service
    middleware: Middleware
    routes: RouteTable
    overload: OverloadGate
    polled: frozenset[tuple[str, str]] = PROBE_ROUTES | {("GET", "/metrics"), ("GET", LIVE_PATH)}
    """Methods and routes that are not in the access log: probes, scrapes, and the console's updates."""

    async def handle_websocket(self, websocket: Any) -> Any:
        """Authenticate a websocket, then pass it to the route that a user has added; refuse it if there is none.

        Cancellation: as the route's handler.
        """
        request = HttpRequest(websocket.scope, websocket.path, max_body_bytes=0)
        try:
            self.middleware.authenticate(request)
            refuse = self.routes.find("WEBSOCKET", self.routes.template_of(websocket.path))
            return await (super().handle_websocket(websocket) if refuse is None else refuse(request))
        except Exception as error:
            refusal = self.middleware.error_response(request, error)
        finally:
            request.end()
        headers = dict(refusal.headers)
        return Response(refusal.body, refusal.status, headers, content_type=refusal.content_type)  # type: ignore[arg-type]


class OwnedServiceLifespan(TrioASGILifespan):
    """The ASGI lifespan, run inside the service's nursery.

    The service does not run in ``app.nursery``: a crash there leaves a server that goes on answering. And a
    ``while_serving`` generator that yields inside a nursery corrupts trio's stack when a child crashes.
    """

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run the service as long as the server runs; if the service fails, or this is not trio, the server ends."""
        if not trio.lowlevel.in_trio_run():
            end_hypercorn(NOT_TRIO)
            await send({"type": "lifespan.startup.failed", "message": NOT_TRIO})
            return
        service = self.app.service  # type: ignore[attr-defined]
        configure_process(service)
        try:
            with unwrap_exception_groups(ModelLoadError, EngineDeadError):
                async with trio.open_nursery() as nursery:
                    await nursery.start(service.run)
                    await super().__call__(receive, send)
                    nursery.cancel_scope.cancel(reason="the server has shut down")
        except (ModelLoadError, EngineDeadError) as error:
            end_hypercorn(str(error))
            # The only message after start-up that makes the server's worker exit.
            await send({"type": "lifespan.shutdown.failed", "message": str(error)})


def create_app(config: Config, service: Service | None = None) -> PoolServeApp:
    """Return the app over ``service``, which the caller runs; without one, the app's lifespan runs its own.

    The latter is for plain ASGI servers. Models are loaded by the service, so errors of models are not raised here.
    """
    app = PoolServeApp(__name__, static_folder=None)
    app.service = service or Service(config)
    if service is None:
        app.asgi_lifespan_class = OwnedServiceLifespan
    app.config.update(MAX_CONTENT_LENGTH=config.network.max_body_bytes, PROPAGATE_EXCEPTIONS=True)
    app.register_error_handler(HTTPException, _raise)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    hosts = None if app.service.places is None else app.service.places.hosts
    stored_routes = {**file_routes(app.service), **batch_routes(app.service)}
    app.routes = RouteTable(
        {
            **task_routes(app.service, DIALECTS, INVOCATIONS),
            **model_routes(app.service),
            **(
                {**model_change_routes(app.service), **adapter_change_routes(app.service)}
                if config.model_changes.model_api
                else {}
            ),
            **(stored_routes if config.batch.is_served else {}),
            **operational_routes(app.service),
            **discovery_routes(app.service),
            **ollama_routes(app.service),
            **({} if hosts is None else host_routes(app.service, hosts)),
            **console_routes(app.service),
            **openapi_routes(
                tuple(DIALECTS),
                INVOCATIONS,
                without=(
                    *(() if config.model_changes.model_api else MODEL_CHANGES | ADAPTER_CHANGES),
                    *(() if config.batch.is_served else stored_routes),
                    *(HOST_ROUTES if hosts is None else ()),
                ),
            ),
        }
    )
    app.middleware = Middleware(
        app.service,
        default=OPENAI,
        by_path={
            **{path: [found.dialect for found in shared] for path, shared in endpoints_by_path(DIALECTS).items()},
            INFO_PATH: [TEI],
            **{path: [OLLAMA] for path in PATHS},
            **{path: [OPEN_INFERENCE] for path in (V2_MODEL, V2_READY)},
        },
        open_routes=PROBE_ROUTES | OPEN_ROUTES,
        for_admins=ADMIN_PATHS | MODEL_CHANGES | ADAPTER_CHANGES,
        monitored=MONITORED_PATHS,
    )
    app.overload = OverloadGate(
        app.service,
        app.middleware,
        app.routes,
        {
            path
            for (_, path), handler in app.routes.routes.items()
            if isinstance(handler, TaskHandler) and errors_agree(handler.candidates)
        },
    )
    responder = LineResponder(app.service, app.routes, OPENAI)
    routes = LineRoutes(
        responder.respond_all,
        responder.paths,
        # In any state of the model.
        lambda name, among: app.service.models.own_name(
            app.service.models.without_suffix(name, MODEL_SUFFIXES, among=among)[0], among=among
        ),
        app.service.api_keys.usage_by_batches,
    )
    app.service.batches.connect(routes, serve_forwarded(app))
    return app


async def _raise(error: HTTPException) -> NoReturn:
    raise error

"""The app that ``trio-pool-serve serve`` serves: without Quart, which takes time and memory in each process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.dialects.invocations import INVOCATIONS
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.dialects.tei import TEI
from trio_pool_serve.api.dialects.tei.info import INFO_PATH, info_routes
from trio_pool_serve.api.dialects.vllm.tokenizer_info import tokenizer_info_routes
from trio_pool_serve.api.http.connection import PoolServeConnection
from trio_pool_serve.api.http.dispatch import TaskHandler, endpoints_by_path, task_routes
from trio_pool_serve.api.http.forwarding import serve_forwarded
from trio_pool_serve.api.http.line_responses import LineResponder
from trio_pool_serve.api.http.middleware import Middleware
from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.request_body import RequestBody
from trio_pool_serve.api.http.request_log import log_request
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.api.routes.batches import batch_routes
from trio_pool_serve.api.routes.console import OPEN_ROUTES, console_routes
from trio_pool_serve.api.routes.host_routes import HOST_ROUTES, host_routes
from trio_pool_serve.api.routes.model_changes import MODEL_CHANGES, model_change_routes
from trio_pool_serve.api.routes.model_list import model_routes
from trio_pool_serve.api.routes.openapi import openapi_routes
from trio_pool_serve.api.routes.operations import ADMIN_PATHS, PROBE_ROUTES, operational_routes
from trio_pool_serve.api.routes.stored_files import file_routes
from trio_pool_serve.batches.batch_runner import LineRoutes
from trio_pool_serve.config import Config
from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.service import Service

if TYPE_CHECKING:
    from quart import Blueprint


BLUEPRINTS: list["Blueprint"] = []
"""Quart blueprints with routes of plugins. Without any, Quart is not imported."""


EarlyResponse: TypeAlias = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers and body."""


class RoutedApp:
    """What the server, and a connection, need of an app over a service: every route of the server is in ``routes``."""

    service: Service
    middleware: Middleware
    routes: RouteTable

    def request_of(self, scope: Mapping[str, Any]) -> HttpRequest:
        """Return the request of an ASGI scope, with the route that it is for."""
        path = self.routes.path_of_route(_below_root_path(scope["path"], scope.get("root_path", "")))
        request = HttpRequest(scope, path, self.service.config.network.max_body_bytes)
        request.route = self.routes.template_of(path)
        return request

    def is_refusing(self, waited_s: float) -> bool:
        """Return whether ``refuse_early`` may refuse a request that has waited so long: some queue is nearly full."""
        served = self.service.served.values()
        return not self.service.draining and any(each.engine.admission.is_refusing(waited_s) for each in served)

    def refuse_early(self, scope: Mapping[str, Any], body: bytes) -> EarlyResponse | None:
        """Return the refusal of a request that no model can take.

        ``None`` if it is to be handled: it may be taken, or refused for another reason. ``body`` is all of its body.
        """
        request = self.request_of(scope)
        handler = self.routes.find(scope["method"], request.path)
        if not isinstance(handler, TaskHandler):
            return None
        request.body.append(body)
        request.body.set_complete()
        response = self.middleware.refuse_early(request, handler)
        if response is None or not isinstance(response.body, bytes):
            return None
        log_request(request, self.service)
        return response.status, response.encoded_headers(), response.body

    async def refuse_websocket(self, request: HttpRequest) -> None:
        """Raise why a websocket is refused; return if only a route of a user can handle it. Cancellation: at once."""
        self.middleware.authenticate(request)
        refuse = self.routes.find("WEBSOCKET", request.path)
        if refuse is not None:
            await refuse(request)


class ServedApp(RoutedApp):
    """The ASGI app of a server to which no user has added routes."""

    def __init__(self, config: Config, service: Service) -> None:
        self.service = service
        connect(self, config)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request, refuse a websocket, or take part in the lifespan. Cancellation: at once."""
        if scope["type"] == "http":
            await PoolServeConnection(self, scope)(receive, send)
        elif scope["type"] == "websocket":
            await self._refuse(scope, send)
        else:
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

    def handler_of_other(self, request: HttpRequest, _: object) -> tuple[RequestBody, Handler]:
        """Return the body of a request whose path is no route's, and its handler."""
        return request.body, _refuse_other

    async def _refuse(self, scope: Any, send: Any) -> None:
        request = HttpRequest(scope, scope["path"], max_body_bytes=0)
        try:
            await self.refuse_websocket(request)
            await _refuse_other(request)
        except Exception as error:
            refusal = self.middleware.error_response(request, error)
        finally:
            request.end()
        started = {"status": refusal.status, "headers": refusal.encoded_headers()}
        await send({"type": "websocket.http.response.start", **started})
        await send({"type": "websocket.http.response.body", "body": refusal.body})


async def _refuse_other(_: HttpRequest) -> NoReturn:
    raise NotFoundError(  # as Quart says it
        "The requested URL was not found on the server. If you entered the URL manually please check your spelling and "
        "try again."
    )


def connect(app: Any, config: Config) -> None:
    """Give an app over a service its routes and its middleware, and the service's batches the app."""
    hosts = None if app.service.places is None else app.service.places.hosts
    stored_routes = {**file_routes(app.service), **batch_routes(app.service)}
    app.routes = RouteTable(
        {
            **task_routes(app.service, DIALECTS, INVOCATIONS),
            **info_routes(app.service),
            **tokenizer_info_routes(app.service),
            **model_routes(app.service),
            **(model_change_routes(app.service) if config.model_changes.model_api else {}),
            **(stored_routes if config.batch.is_served else {}),
            **operational_routes(app.service),
            **({} if hosts is None else host_routes(app.service, hosts)),
            **console_routes(app.service),
            **openapi_routes(
                tuple(DIALECTS),
                INVOCATIONS,
                without=(
                    *(() if config.model_changes.model_api else MODEL_CHANGES),
                    *(() if config.batch.is_served else stored_routes),
                    *(HOST_ROUTES if hosts is None else ()),
                ),
            ),
        }
    )
    dialects = {path: [found.dialect for found in shared] for path, shared in endpoints_by_path(DIALECTS).items()}
    app.middleware = Middleware(
        app.service,
        default=OPENAI,
        by_path={**dialects, INFO_PATH: [TEI]},
        open_routes=PROBE_ROUTES | OPEN_ROUTES,
        for_admins=ADMIN_PATHS | MODEL_CHANGES,
    )
    responder = LineResponder(app.service, DIALECTS, INVOCATIONS, OPENAI)
    routes = LineRoutes(
        responder.respond_all,
        responder.paths,
        # Whatever the state of the model is.
        lambda name, among: app.service.models.find(name, among=among).source.name,
        app.service.api_keys.usage_by_batches,
    )
    app.service.batches.connect(routes, serve_forwarded(app))


def _below_root_path(path: str, root_path: str) -> str:
    """Return the path that routes have: without the root path, with one slash at its beginning; empty if outside."""
    if root_path and not path.startswith(root_path.rstrip("/") + "/"):
        return ""
    return "/" + path.removeprefix(root_path).lstrip("/")

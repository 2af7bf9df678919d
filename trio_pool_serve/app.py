"""The composition root: settings in, an ASGI app out, which is Quart's: users can add routes to it."""

import logging
from functools import partial
from typing import Any, NoReturn

import trio
from quart import Request, Response
from quart.wrappers.request import Body
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection, TrioASGILifespan
from werkzeug.exceptions import HTTPException

from trio_pool_serve.api.http.connection import PoolServeConnection
from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import Config
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.process_setup import configure_process
from trio_pool_serve.served_app import BLUEPRINTS as BLUEPRINTS
from trio_pool_serve.served_app import RoutedApp, connect
from trio_pool_serve.service import Service

logger = logging.getLogger(__name__)


class PoolServeApp(RoutedApp, QuartTrio):
    """The ASGI app over a service: every route of the server is in ``routes``, none is Quart's.

    Quart handles requests for other paths: those of routes and blueprints that users register on the app, or its 404.
    What it raises comes out, so that the middleware responds to it.
    """

    asgi_http_class = PoolServeConnection  # type: ignore[assignment]  # has the same two methods

    def handler_of_other(self, request: HttpRequest, send: Any) -> tuple[Body, Handler]:
        """Return the body of a request whose path is none of ``routes``, and Quart as its handler."""
        scope: Any = request.scope
        quart_request = TrioASGIHTTPConnection(self, scope)._create_request_from_scope(send)  # noqa: SLF001
        return quart_request.body, partial(_respond_by_quart, self, quart_request)

    async def handle_websocket(self, websocket: Any) -> Any:
        """Handle a websocket by the route that a user has added for it, after authentication; refuse others.

        Cancellation: as the route's handler.
        """
        request = HttpRequest(websocket.scope, websocket.path, max_body_bytes=0)
        try:
            await self.refuse_websocket(request)
            return await super().handle_websocket(websocket)
        except Exception as error:
            refusal = self.middleware.error_response(request, error)
        finally:
            request.end()
        headers = dict(refusal.headers)
        return Response(refusal.body, refusal.status, headers, content_type=refusal.content_type)  # type: ignore[arg-type]


async def _respond_by_quart(app: Any, quart_request: Request, _: HttpRequest) -> HttpResponse:
    response = await app.handle_request(quart_request)
    # Quart's own responses have bodies to be entered and iterated; redirects are werkzeug's.
    body: Any = response.response if isinstance(response, Response) else response.get_data()
    return HttpResponse(body, None, response.status_code, tuple(response.headers.items()))


class OwnedServiceLifespan(TrioASGILifespan):
    """The ASGI lifespan with the service's nursery around it.

    Around, and not inside: a crash in ``app.nursery`` leaves a server that goes on answering, and a
    ``while_serving`` generator that yields inside a nursery corrupts trio's stack when a child crashes.
    """

    async def __call__(self, receive: Any, send: Any) -> None:
        """Run the service for as long as the server lives; if the service fails, the server ends with it."""
        service = self.app.service  # type: ignore[attr-defined]
        configure_process(service)
        try:
            with unwrap_exception_groups(ModelLoadError, EngineDeadError):
                async with trio.open_nursery() as nursery:
                    await nursery.start(service.run)
                    await super().__call__(receive, send)
                    nursery.cancel_scope.cancel(reason="the server has shut down")
        except (ModelLoadError, EngineDeadError) as error:
            logger.critical("%s", error)
            # The one message after start-up that makes the server's worker exit.
            await send({"type": "lifespan.shutdown.failed", "message": str(error)})


def create_app(config: Config, service: Service | None = None) -> PoolServeApp:
    """Return the app over ``service``, which the caller runs; or over one of its own.

    Without ``service`` the app's lifespan loads the model and runs the engine: what a plain ASGI server
    needs. Raises nothing that depends on the model: that is loaded once the server is up.
    """
    app = PoolServeApp(__name__)
    app.service = service or Service(config)
    if service is None:
        app.asgi_lifespan_class = OwnedServiceLifespan
    app.config["MAX_CONTENT_LENGTH"] = config.network.max_body_bytes
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.register_error_handler(HTTPException, _raise)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    connect(app, config)
    return app


async def _raise(error: HTTPException) -> NoReturn:
    raise error

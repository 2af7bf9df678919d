"""The same exchanges and answers by way of Quart: its hooks, its errors, its responses."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec

from quart import Quart, Response, g, has_request_context, request, websocket
from werkzeug.exceptions import HTTPException

from trio_pool_serve import errors
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.exchange import Exchange, Handler
from trio_pool_serve.api.http.received_body import ReceivedBody
from trio_pool_serve.api.http.reception import Reception

P = ParamSpec("P")

OF_HTTP_STATUS: dict[int, type[errors.PoolServeError]] = {
    404: errors.NotFoundError,
    405: errors.MethodNotAllowedError,
}
"""What the framework raises by itself, in our terms."""


def receive_with_quart(app: Quart, reception: Reception) -> None:
    """Have all that Quart routes, or finds no route for, pass the reception."""

    @app.before_request
    async def begin() -> None:
        reception.admit(_exchange())

    @app.after_request
    async def end(response: Response) -> Response:
        response.headers.update(reception.last_words(_exchange()))
        return response

    @app.errorhandler(Exception)
    async def refuse(error: Exception) -> Response:
        return response_of(reception.refuse(_exchange(), error))

    @app.errorhandler(HTTPException)
    async def refuse_http(error: HTTPException) -> Response:
        ours = OF_HTTP_STATUS.get(error.code or 500)
        if ours is None:
            return await refuse(error)
        response = await refuse(ours(error.description or str(error)))
        response.headers.update({name: value for name, value in error.get_headers() if name == "Allow"})
        return response


def responding(view: Callable[P, Awaitable[Answer]]) -> Callable[P, Awaitable[Response]]:
    """Return Quart's view over one that returns an ``Answer``."""

    @wraps(view)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Response:
        return response_of(await view(*args, **kwargs))

    return run


def view_of(handler: Handler) -> Callable[[], Awaitable[Response]]:
    """Return Quart's view over a handler."""

    @responding
    async def view() -> Answer:
        return await handler(_exchange())

    return view


def response_of(answer: Answer) -> Response:
    """Return an answer as Quart sends it."""
    return Response(answer.body, status=answer.status, content_type=answer.content_type, headers=dict(answer.headers))


def _exchange() -> Exchange:
    """Return the exchange of the request that Quart is busy with; a websocket's handshake is one without a body."""
    if "exchange" not in g:
        if has_request_context():
            g.exchange = Exchange(request.scope, request.path, request.body)  # type: ignore[arg-type]
        else:
            g.exchange = Exchange(websocket.scope, websocket.path, ReceivedBody(None, None))
    exchange: Exchange = g.exchange
    return exchange

"""One HTTP request on its connection: the seam between quart-trio and hypercorn."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any
from urllib.parse import urlparse

import trio
from quart import Request, Response
from quart.wrappers.request import Body
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import MethodNotAllowed, NotFound

from trio_pool_serve.api.http.request import CLIENT_LEFT, Handler, HttpRequest, StreamingHandler
from trio_pool_serve.api.http.request_body import BodyPieces, RequestBody
from trio_pool_serve.api.http.request_log import begin_trace, log_request
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import RouteTable, method_not_allowed
from trio_pool_serve.errors import innermost

SILENCE_S = 1.0
"""Seconds of silence after which a client counts as waiting for the response, not as sending a body."""


EXCHANGE = "trio_pool_serve.exchange"
"""The ASGI extension of a server whose ``deliver_to`` delivers a request to a ``PoolServeConnection``, by ``take`` and
``leave``, where ASGI's ``receive`` would need a task that waits. The request runs in its ``cancel_scope``."""


class PoolServeConnection(TrioASGIHTTPConnection):
    """Receives a request, has its handler respond through the middleware, and sends the response.

    The app's table of routes has the handlers; requests for other paths are handled by Quart, for routes that users
    have added to the app, and for its 404.

    Differs from quart-trio's connection between the end of a request and the end of its response:

    A client may finish sending before it is answered. Many responses are known before the body has arrived: 401, 404,
    413. Most clients send their whole body before they read a response; if the body is not read, both sides wait for
    each other. So the rest of the body is received and thrown away, for as long as it keeps coming and at most for
    ``--client-timeout-s``.

    A response that is being sent is not cancelled. hypercorn announces ``http.disconnect`` as soon as the response is
    out, and then, still inside the call that sent it, readies the connection for the next request. quart-trio takes the
    announcement for a client that disconnected and cancels that call: the connection would never be closed when idle,
    nor read again. If the client really disconnects, sending fails by itself. A stream is cancelled all the same while
    more of it is to come: it is still being computed.

    A request target without a path counts as ``/``.
    """

    app: Any
    _body: RequestBody | Body

    def __init__(self, app: Any, scope: Any) -> None:
        scope["path"] = _path_of_target(scope["path"])
        super().__init__(app, scope)
        self._body_ended = False
        self._is_finishing = False
        self._silence: trio.CancelScope | None = None
        self._exchange: Any = scope.get("extensions", {}).get(EXCHANGE)
        self._request_scope = trio.CancelScope() if self._exchange is None else self._exchange.cancel_scope

    async def __call__(self, receive: Any, send: Any) -> None:
        """Handle the request in this task; a child receives, unless the server delivers. Cancellation: at once."""
        routes: RouteTable = self.app.routes
        request = routes.request_of(self.scope, self.app.service.config.network.max_body_bytes)
        handler = routes.find(self.scope["method"], request.route)
        self._body = request.body
        begin_trace(request, self.app.service)
        try:
            await self._handle(request, handler, receive, send)
        except BaseException as error:
            cause = innermost(error)
            reason = cause.reason if isinstance(cause, trio.Cancelled) else None
            request.cancel_reason = reason or type(cause).__name__
            raise
        finally:
            request.end()
            log_request(request, self.app.service, self.app.polled)

    async def _handle(self, request: HttpRequest, handler: Handler | None, receive: Any, send: Any) -> None:
        response: HttpResponse | None = None
        if handler is None:
            quart_request = self._create_request_from_scope(send)
            self._body, handler = quart_request.body, partial(_respond_by_quart, self.app, quart_request)
        elif request.is_bodiless_get and not isinstance(handler, StreamingHandler):
            response = await self.app.middleware.respond(request, handler)
            if isinstance(response.body, bytes):
                await self._send(response, send)
                return
        with nullcontext() if self._exchange is not None else self._request_scope:
            if isinstance(handler, StreamingHandler):
                response = await self._response_to_stream(request, handler, receive)
            if self._exchange is not None:
                self._exchange.deliver_to(self)
                await self._respond(request, handler, response, send)
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._receive, receive)
                    await self._respond(request, handler, response, send)
                    nursery.cancel_scope.cancel(reason="the request has been answered")
        if self._request_scope.cancelled_caught:
            request.cancel_reason = CLIENT_LEFT

    async def _response_to_stream(self, request: HttpRequest, handler: Handler, receive: Any) -> HttpResponse:
        """Return the response to a request whose handler receives the body: as fast as it can, and no faster."""

        async def receive_piece() -> tuple[bytes, bool]:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.leave()
                await trio.sleep_forever()  # cancelled
            self._body_ended = not message.get("more_body", False)
            return message.get("body", b""), self._body_ended

        request.pieces = BodyPieces(receive_piece, self.app.service.config.time_limits.client_timeout_s)
        response: HttpResponse = await self.app.middleware.respond(request, handler)
        await request.pieces.discard_rest(SILENCE_S)
        return response

    async def _respond(self, request: HttpRequest, handler: Handler, response: HttpResponse | None, send: Any) -> None:
        """Send the response to a request: by default the handler's, once the body has ended or no more of it comes."""
        if response is None:
            response = await self.app.middleware.respond(request, handler)
            if not self._body_ended:
                await self._wait_for_body_end()

        async def noting(message: Any) -> None:
            """Note when the last part of a stream is sent: nothing is being computed any more."""
            self._is_finishing = message.get("more_body", True) is False
            await send(message)

        self._is_finishing = isinstance(response.body, bytes)
        await self._send(response, send if self._is_finishing else noting)

    async def _send(self, response: HttpResponse, send: Any) -> None:
        if self._exchange is not None and isinstance(response.body, bytes):
            await self._exchange.respond(response.status, response.encoded_headers(), response.body)
        else:
            await response.send(send)

    async def _receive(self, receive: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            self.take(message.get("body", b""), is_last=not message.get("more_body", False))
        self.leave()

    def take(self, data: bytes, *, is_last: bool) -> None:
        """Take a piece of the body."""
        self._body.append(data)
        if is_last:
            self._body.set_complete()
            self._body_ended = True
        if self._silence is not None:
            self._silence.deadline = -math.inf if is_last else trio.current_time() + SILENCE_S

    def leave(self) -> None:
        """Cancel the request: the client has disconnected."""
        self._body_ended = True
        if not self._is_finishing:
            self._request_scope.cancel(reason=CLIENT_LEFT)

    async def _wait_for_body_end(self) -> None:
        """Wait until the body has ended, nothing of it has come for ``SILENCE_S``, or its time is over."""
        limit_s = self.app.service.config.time_limits.client_timeout_s
        with trio.move_on_after(limit_s), trio.move_on_after(SILENCE_S) as self._silence:
            await trio.sleep_forever()


async def _respond_by_quart(app: Any, quart_request: Request, request: HttpRequest) -> HttpResponse:
    try:
        response = await app.handle_request(quart_request)
    except (NotFound, UnicodeDecodeError) as error:  # ``UnicodeDecodeError`` for a query
        if getattr(error, "description", None) not in (None, NotFound.description):
            raise  # the message of a route that a user has added
        raise app.routes.not_found(request.scope["path"]) from error
    except MethodNotAllowed as error:
        raise method_not_allowed(request, sorted(error.valid_methods or ())) from error
    # Quart's own responses have bodies to be entered and iterated; redirects are werkzeug's.
    body: Any = response.response if isinstance(response, Response) else response.get_data()
    return HttpResponse(body, None, response.status_code, tuple(response.headers.items()))


def _path_of_target(target: str) -> str:
    """Return the path of a request target in origin or absolute form, ``/`` if it has none."""
    if target.startswith("/"):
        return target
    try:
        path = urlparse(target).path
    except ValueError:
        return "/"
    return path if path.startswith("/") else "/"

"""One HTTP request on its connection: the seams between quart-trio and hypercorn."""

from typing import Any
from urllib.parse import urlparse

import trio
from quart.asgi import ASGIHTTPConnection
from quart_trio.asgi import TrioASGIHTTPConnection

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.event_stream import EventStream
from trio_pool_serve.api.http.exchange import Exchange
from trio_pool_serve.api.http.received_body import ReceivedBody

SILENCE_S = 1.0
"""A client that has sent nothing for this long is waiting for an answer, not sending a body."""


class PoolServeConnection(TrioASGIHTTPConnection):
    """Mends three things that happen between a request's end and its answer's.

    A client may finish sending before it is answered. Many answers are known before the body has arrived:
    401, 404, 413. Most clients send their whole body before they look for an answer; if nobody reads it, both
    sides wait for each other. So the rest of the body is received and thrown away, for as long as it keeps
    coming and at most for ``--body-timeout-s``.

    An answer that is being sent is not cancelled. hypercorn announces ``http.disconnect`` as soon as the
    answer is out, and then, still inside the call that sent it, readies the connection for the next request.
    quart-trio takes the announcement for a client that left and cancels that call: the connection would never
    be closed when idle, nor read again. A client that really leaves makes the sending fail by itself. A stream
    is cancelled all the same while more of it is to come: somebody still computes for it.

    A request target without a path is a path that no route has.

    And it answers what is asked all the time, tasks and probes, beneath Quart: the same handlers without Quart's
    routing, contexts and responses.
    """

    app: Any

    def __init__(self, app: Any, scope: Any) -> None:
        scope["path"] = _path(scope["path"])
        super().__init__(app, scope)
        self._body_ended = False
        self._answering = False
        self._arrived = trio.Event()

    async def __call__(self, receive: Any, send: Any) -> None:
        """Handle the request in this task, with a child that receives. Cancellation: at once."""
        path = _within_root(self.scope["path"], self.scope.get("root_path", ""))
        handler = self.app.handlers.get((self.scope["method"], path))
        if handler is None:
            request = self._create_request_from_scope(send)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                await self.handle_request(nursery, request, send)
            return
        exchange = Exchange(self.scope, path, self._empty_body())
        if exchange.ends_with_its_head:
            await send_answer(send, await self.app.reception.answer(exchange, handler))
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, exchange, receive)
            answer = await self.app.reception.answer(exchange, handler)
            await self._wait_for_body_end()
            await send_answer(self._noting(send, answer.body), answer)
            nursery.cancel_scope.cancel(reason="the request has been answered")

    def _empty_body(self) -> ReceivedBody:
        headers = dict(self.scope["headers"])
        length = b"" if b"transfer-encoding" in headers else headers.get(b"content-length", b"")
        return ReceivedBody(int(length) if length.isdigit() else None, self.app.config["MAX_CONTENT_LENGTH"])

    async def handle_messages(self, nursery: trio.Nursery, request: Any, receive: Any) -> None:  # type: ignore[override]
        """Receive until the client is gone. Cancellation: at once."""

        async def noting() -> Any:
            message = await receive()
            self._body_ended = self._body_ended or not message.get("more_body", False)
            self._arrived.set()
            return message

        await ASGIHTTPConnection.handle_messages(self, request, noting)
        if not self._answering:
            nursery.cancel_scope.cancel(reason="the client has left")

    async def _send_response(self, send: Any, response: Any) -> None:
        await self._wait_for_body_end()
        await super()._send_response(self._noting(send, getattr(response, "response", None)), response)

    def _noting(self, send: Any, body: object) -> Any:
        """Return what sends an answer with that body, and takes note once nobody computes for it any more."""
        streaming = isinstance(body, EventStream)

        async def noting(message: Any) -> None:
            self._answering = not streaming or message.get("more_body", True) is False
            await send(message)

        return noting

    async def _wait_for_body_end(self) -> None:
        if self._body_ended:
            return
        with trio.move_on_after(self.app.service.config.time_limits.body_timeout_s):
            while not self._body_ended:
                self._arrived = trio.Event()
                with trio.move_on_after(SILENCE_S) as silence:
                    await self._arrived.wait()
                if silence.cancelled_caught:
                    return


async def send_answer(send: Any, answer: Answer) -> None:
    """Send an answer as ASGI's messages. Cancellation: a stream's events end at once; else as the server's ``send``."""
    headers = [(name.encode(), value.encode("latin1")) for name, value in answer.headers.items()]
    headers.append((b"content-type", answer.content_type.encode()))
    body = answer.body
    if isinstance(body, bytes):
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if not isinstance(body, bytes):
        async with body as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _path(target: str) -> str:
    """Return the path of a request target in origin or absolute form, ``/`` if it has none."""
    if target.startswith("/"):
        return target
    try:
        path = urlparse(target).path
    except ValueError:
        return "/"
    return path if path.startswith("/") else "/"


def _within_root(path: str, root_path: str) -> str:
    """Return the path that Quart finds routes by: below the root path, with one slash at its beginning."""
    if root_path and (path == root_path or not path.startswith(root_path)):
        return ""
    return "/" + path.removeprefix(root_path).lstrip("/")

"""One request and its response as an ASGI app sees them, and the call of the app."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any

import trio
from attrs import define, field
from hypercorn.config import Config

from trio_pool_serve.api.http.connection import PoolServeConnection
from trio_pool_serve.server.incoming_request import IncomingRequest
from trio_pool_serve.server.outgoing_response import Headers, OutgoingResponse, server_headers

MAX_UNRECEIVED = 64 * 1024
"""Bytes of a body that wait for the app; above this, no more are read from the client."""


@define(eq=False)
class Exchange:
    """ASGI's ``receive`` and ``send`` for one request.

    The ``request`` had waited for ``waited_s`` seconds when it was read. The connection delivers the body with ``take``
    and the disconnect with ``leave``, which never wait. ``write`` sends bytes to the client; ``is_last()`` is true if
    the server wants to close the connection. Instead of receiving messages, an app may register a listener, to which
    body and disconnect are delivered at once without a task. The app runs in ``cancel_scope``.
    """

    request: IncomingRequest
    waited_s: float
    _config: Config
    _is_last: Callable[[], bool]
    _write: Callable[..., Awaitable[None]]
    cancel_scope: trio.CancelScope
    response: OutgoingResponse | None = field(init=False, default=None)
    is_answered: bool = field(init=False, default=False)
    has_left: bool = field(init=False, default=False)
    _head: bytes = field(init=False, default=b"")
    _listener: PoolServeConnection | None = field(init=False, default=None)
    _unreceived: list[bytes] = field(init=False, factory=list)
    _body_has_ended: bool = field(init=False, default=False)
    _end_is_received: bool = field(init=False, default=False)
    _changed: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    # -- for the app ------------------------------------------------------------------------------------------------

    def deliver_to(self, listener: PoolServeConnection) -> None:
        """Deliver everything that has arrived or will arrive to ``listener``; ``receive`` is not used any more."""
        self._listener = listener
        if self._unreceived or self._body_has_ended:
            listener.take(b"".join(self._unreceived), is_last=self._body_has_ended)
            self._unreceived.clear()
        if self.has_left:
            listener.leave()
        self._changed.unpark_all()

    async def receive(self) -> Any:
        """Return the next message: pieces of the body, then the disconnect. Cancellation: at once."""
        while True:
            if self._unreceived or (self._body_has_ended and not self._end_is_received):
                body = b"".join(self._unreceived)
                self._unreceived.clear()
                self._end_is_received = self._body_has_ended
                self._changed.unpark_all()
                return {"type": "http.request", "body": body, "more_body": not self._body_has_ended}
            if self.has_left or self.is_answered:
                return {"type": "http.disconnect"}
            await self._changed.park()

    async def send(self, message: Any) -> None:
        """Send a message of the response; the head waits for the body if that follows at once.

        Cancellation: at once; a response that it cuts off ends the connection.
        """
        kind = message["type"]
        if kind == "http.response.start" and self.response is None:
            response = self._begin(int(message["status"]), message.get("headers", ()))
            if not response.has_known_length:
                await self._write(self._take_head())
        elif kind == "http.response.body" and self.response is not None and not self.is_answered:
            is_last = not message.get("more_body", False)
            body = self.response.body(bytes(message.get("body", b"")), is_last=is_last)
            if self._head or body:
                await self._write(self._take_head(), body)
            if is_last:
                self.response.check_end()
            self.is_answered = is_last
            self._changed.unpark_all()
            if not is_last:
                await trio.lowlevel.checkpoint()  # a write that finds room does not wait
        else:
            raise RuntimeError(f"{kind} is no message of an HTTP/1.1 response, or comes out of turn.")

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response, instead of messages. Cancellation: as ``send``."""
        response = self._begin(status, headers)
        await self._write(self._take_head(), response.body(body, is_last=True))
        response.check_end()
        self.is_answered = True
        self._changed.unpark_all()

    def _begin(self, status: int, headers: Headers) -> OutgoingResponse:
        response = OutgoingResponse(self.request, status, headers)
        self._head = response.head(server_headers(self._config), is_last=self._is_last())
        self.response = response  # not before: after headers that cannot be sent, another response may follow
        return response

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    # -- for the connection -----------------------------------------------------------------------------------------

    def take(self, data: bytes, *, is_last: bool) -> None:
        """Take a piece of the body."""
        self._body_has_ended = is_last
        if self._listener is not None:
            self._listener.take(data, is_last=is_last)
            return
        if data:
            self._unreceived.append(data)
        self._changed.unpark_all()

    def leave(self) -> None:
        """Tell the app that the client has disconnected."""
        if self.has_left:
            return
        self.has_left = True
        if self._listener is not None:
            self._listener.leave()
        self._changed.unpark_all()

    def end(self) -> None:
        """Forget the listener, which refers to this exchange: so both are freed at once, with all that they hold."""
        self._listener = None

    async def wait_for_room(self) -> None:
        """Wait while too much of the body waits for the app. Cancellation: at once."""
        while sum(map(len, self._unreceived)) > MAX_UNRECEIVED and not self.is_answered:
            await self._changed.park()


@coroutine
def call_in_context(
    call: Coroutine[Any, Any, Any], context: Context, before_waiting: Callable[[], object]
) -> Generator[Any, Any, None]:
    """Run ``call`` in a context; call ``before_waiting()`` when it first waits.

    ``before_waiting`` starts the task that notices a disconnect, so a request that is answered without waiting, a
    refused one for example, costs no second task. Cancellation: as ``call``.
    """
    try:
        waits_for = context.run(call.send, None)
    except StopIteration:
        return
    before_waiting()
    trio.lowlevel.current_task().context = context  # for the steps that trio makes from now on
    while True:
        try:
            try:
                outcome = yield waits_for
            except BaseException as error:
                waits_for = call.throw(error)  # raises it, or another error of ``call``
            else:
                waits_for = call.send(outcome)
        except StopIteration:
            return

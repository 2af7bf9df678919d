"""Refusals of an overloaded server: without an exchange or a call of the app, on new connections without a task.

A server that is asked for five times what it can compute refuses four of five requests. Their share of the event loop
is what is missing for the others: a scope, an exchange and a decoded body for each would take several times what the
refusal itself does.

When even so the loop does not keep up, tasks of the addresses that were refused just before are refused unread, for
still less: health checks do not wait behind thousands of refusals.
"""

import logging
import math
import socket
from typing import Any

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.app import PoolServeApp
from trio_pool_serve.server.client_socket import MAX_RECEIVED, seconds_since_arrival
from trio_pool_serve.server.incoming_request import (
    BadRequestError,
    IncomingRequest,
    LeftToHypercornError,
    RequestBuffer,
)
from trio_pool_serve.server.listening_socket import REFUSAL
from trio_pool_serve.server.outgoing_response import head_bytes
from trio_pool_serve.server.server_context import ServerContext

logger = logging.getLogger(__name__)

MAX_LAG_S = 0.25
"""How long after its arrival a request is read at the latest, before some are refused unread."""

REFUSED_AGAIN_S = 1.0
"""For how long an address is refused unread after a refusal: then one of its requests is read, and may be taken."""

MAX_ADDRESSES = 4096
"""That are remembered."""


@frozen(eq=False)
class Refusal:
    """The bytes of a response, and whether the connection is closed behind it."""

    content: bytes
    closes: bool


LEFT = Refusal(b"", closes=True)
"""Of a client that reads no more."""

UNREAD = Refusal(REFUSAL, closes=True)

PATIENCE_S = 1.0
"""For how long a task waits for the next request of a connection before more is made for it."""


@define(eq=False)
class EarlyRefusals:
    """Responds to the requests that ``app`` refuses early."""

    app: PoolServeApp
    config: Config
    context: ServerContext
    _refused_at: dict[str, float] = field(init=False, factory=dict)
    """By address."""

    def answer(self, connection: socket.socket, peer: Any) -> Refusal | bytes:
        """Answer the first request of a connection if it has arrived whole, with nothing behind it, and is refused.

        Returns the refusal; or what has been read of a connection that is to be served.
        """
        # 121 instead of 226 µs of CPU time per refused request if the server closes the connection, 182 instead of 224,
        # with ``answer_next``, if the client does (python -m benchmarks.refusal_costs, "on acceptance").
        received = _received(connection)
        if not received:
            return b"" if received is None else LEFT
        waited_s = seconds_since_arrival(connection)
        client = parse_socket_addr(connection.family, peer)
        address = "" if client is None else client[0]
        if waited_s > MAX_LAG_S and self._is_refused_again(address, received) and self.app.is_refusing(waited_s):
            self.context.connections.note_refusal()  # 70 instead of 121 µs (as above, "reading")
            return _sent(connection, UNREAD)
        found = self._answer(connection, client, received, waited_s)
        if isinstance(found, Refusal):
            self._remember(address, trio.current_time())
        return found

    async def answer_next(self, connection: socket.socket, peer: Any) -> Refusal | bytes:
        """Answer what follows a refused request, until it is not refused or nothing has arrived for ``PATIENCE_S``.

        Returns as ``answer``; behind a refusal the connection is closed. Cancellation: at once.
        """
        client = parse_socket_addr(connection.family, peer)
        with self.context.terminated.waiting(trio.current_time() + PATIENCE_S) as limit:
            while True:
                await trio.lowlevel.wait_readable(connection)
                received = _received(connection)
                if received is None:
                    continue
                if not received:
                    return LEFT
                found = self._answer(connection, client, received, seconds_since_arrival(connection))
                if isinstance(found, bytes) or found.closes:
                    return found
                limit.deadline = trio.current_time() + PATIENCE_S
        return b""

    def _answer(
        self, connection: socket.socket, client: tuple[str, int] | None, received: bytes, waited_s: float
    ) -> Refusal | bytes:
        if not self.app.is_refusing(waited_s):
            return received
        buffer = RequestBuffer(self.config.h11_max_incomplete_size)
        buffer.append(received)
        try:
            request = buffer.take_head()
            body = b"" if request is None else buffer.take_body(request)
        except (BadRequestError, LeftToHypercornError):
            return received
        if request is None or buffer.unread:
            return received
        refusal = self.response_to(request, body, client, waited_s, is_last=False)
        return received if refusal is None else _sent(connection, refusal)

    def _is_refused_again(self, address: str, received: bytes) -> bool:
        """Return whether a request may be refused unread: a task's, of an address that has just been refused."""
        refused_at = self._refused_at.get(address, -math.inf)
        return received.startswith(b"POST ") and trio.current_time() - refused_at < REFUSED_AGAIN_S

    def _remember(self, address: str, now: float) -> None:
        if len(self._refused_at) >= MAX_ADDRESSES:
            self._refused_at.clear()
        self._refused_at[address] = now

    def response_to(
        self, request: IncomingRequest, body: bytes, client: tuple[str, int] | None, waited_s: float, *, is_last: bool
    ) -> Refusal | None:
        """Return the response to a request; ``None`` if it is to be handled, or has not arrived whole.

        With ``is_last`` the server closes the connection behind it.
        """
        if not request.is_complete:
            return None
        try:
            refused = self.app.refuse_early(request.scope(self.config.root_path, client, waited_s), body)
            if refused is None:
                return None
            status, headers, content = refused
            closes = request.closes or is_last
            headers += self.context.server_headers(self.config).now()
            if closes:
                headers.append((b"Connection", b"close"))
            return Refusal(head_bytes(status, headers) + content, closes)
        except Exception as error:
            # Handled as any other request, it ends its own connection only.
            logger.warning("an early refusal failed: %s", type(error).__name__)
            logger.debug("traceback of the early refusal", exc_info=error)
            return None


def _received(connection: socket.socket) -> bytes | None:
    """Return what has arrived, nothing if the client sends no more, ``None`` if there is nothing yet."""
    try:
        return connection.recv(MAX_RECEIVED, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _sent(connection: socket.socket, refusal: Refusal) -> Refusal:
    """Send a refusal, which fits: there has been room for those before it."""
    try:
        connection.send(refusal.content, socket.MSG_DONTWAIT)
    except OSError:
        return LEFT
    return refusal

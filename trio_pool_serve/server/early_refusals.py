"""Refusals of an overloaded server: without an exchange or a call of the app, on new connections without a task.

A server with five times the requests that it can compute refuses four of five. The event loop's time for them is lost
for the others: a scope, an exchange and a decoded body for each would cost several times as much as the refusal itself.

If the loop still lags, POST requests from addresses that were refused just before are refused unread, which costs even
less: health checks do not wait behind thousands of refusals.
"""

import logging
import math
import select
import socket
from typing import Any

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.app import PoolServeApp
from trio_pool_serve.server.client_socket import MAX_RECEIVED, has_arrived, seconds_since_arrival
from trio_pool_serve.server.incoming_request import (
    HTTP2_PREFACE,
    BadRequestError,
    IncomingRequest,
    LeftToHypercornError,
    RequestBuffer,
)
from trio_pool_serve.server.listening_socket import REFUSAL
from trio_pool_serve.server.outgoing_response import head_bytes, server_headers
from trio_pool_serve.server.server_context import ServerContext

logger = logging.getLogger(__name__)

MAX_LAG_S = 0.25
"""If a request was read later than this after its arrival, some requests are refused unread."""

REFUSED_AGAIN_S = 1.0
"""An address is refused unread for this long after a refusal; then one of its requests is read, and may be served."""

MAX_ADDRESSES = 4096
"""Addresses that are remembered."""


@frozen(eq=False)
class Refusal:
    """The bytes of a response, and whether the connection is closed after it."""

    content: bytes
    closes: bool


CLIENT_LEFT = Refusal(b"", closes=True)
"""For a client that no longer reads."""

UNREAD = Refusal(REFUSAL, closes=True)

PATIENCE_S = 1.0
"""Seconds that a task waits for the next request of a connection before an ``HttpConnection`` is made for it."""


@define(eq=False)
class EarlyRefusals:
    """Answers requests that ``app`` refuses early."""

    app: PoolServeApp
    config: Config
    context: ServerContext
    _refused_at: dict[str, float] = field(init=False, factory=dict)
    """By address."""

    def answer(self, connection: socket.socket, peer: Any) -> Refusal | bytes:
        """Answer the first request of a connection if it is refused, and has arrived whole with nothing after it.

        Return the refusal; or, if the connection must be served, the bytes read from it.
        """
        # 121 instead of 226 µs of CPU time per refused request if the server closes the connection, 182 instead of 224,
        # with ``answer_next``, if the client does (python -m benchmarks.refusal_costs, "on acceptance").
        received = _received(connection)
        if not received:
            return b"" if received is None else CLIENT_LEFT
        if received.startswith(HTTP2_PREFACE) and has_arrived(connection, select.POLLRDHUP):
            return CLIENT_LEFT  # as later, in ``ContainedConnection.client_has_left``
        waited_s = seconds_since_arrival(connection)
        client = parse_socket_addr(connection.family, peer)
        address = "" if client is None else client[0]
        if waited_s > MAX_LAG_S and self._is_refused_again(address, received) and self.app.is_refusing(waited_s):
            self.context.connections.on_refusal()  # 70 instead of 121 µs (as above, "reading")
            return _sent(connection, UNREAD)
        found = self._answer(connection, client, received, waited_s)
        if isinstance(found, Refusal):
            self._remember(address, trio.current_time())
        return found

    async def answer_next(self, connection: socket.socket, peer: Any) -> Refusal | bytes:
        """Answer the requests after a refused one, until one is not refused or none arrives for ``PATIENCE_S``.

        Return as ``answer``; after a refusal the connection is closed. Cancellation: at once.
        """
        client = parse_socket_addr(connection.family, peer)
        with self.context.terminated.waiting(trio.current_time() + PATIENCE_S) as limit:
            while True:
                await trio.lowlevel.wait_readable(connection)
                received = _received(connection)
                if received is None:
                    continue
                if not received:
                    return CLIENT_LEFT
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
        """Return whether a request may be refused unread: a POST from an address that was refused just before."""
        return received.startswith(b"POST ") and (
            trio.current_time() - self._refused_at.get(address, -math.inf) < REFUSED_AGAIN_S
        )

    def _remember(self, address: str, now: float) -> None:
        if len(self._refused_at) >= MAX_ADDRESSES:
            self._refused_at.clear()
        self._refused_at[address] = now

    def response_to(
        self, request: IncomingRequest, body: bytes, client: tuple[str, int] | None, waited_s: float, *, is_last: bool
    ) -> Refusal | None:
        """Return the refusal of a request; ``None`` if it must be handled, or has not arrived whole.

        With ``is_last`` the server closes the connection after it.
        """
        if not request.is_complete:
            return None
        try:
            refused = self.app.refuse_early(request.scope(self.config.root_path, client, waited_s), body)
            if refused is None:
                return None
            status, headers, content = refused
            closes = request.closes or is_last
            headers += server_headers(self.config)
            if closes:
                headers.append((b"Connection", b"close"))
            return Refusal(head_bytes(status, headers) + content, closes)
        except Exception as error:
            # The request is handled like any other: then it can end only its own connection.
            logger.warning("an early refusal failed: %s", type(error).__name__)
            logger.debug("traceback of the early refusal", exc_info=error)
            return None


def _received(connection: socket.socket) -> bytes | None:
    """Return the bytes that have arrived; empty if the client sends no more, ``None`` if none have arrived."""
    try:
        return connection.recv(MAX_RECEIVED, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _sent(connection: socket.socket, refusal: Refusal) -> Refusal:
    """Send a refusal; it fits into the socket's buffer, as earlier ones were read."""
    try:
        connection.send(refusal.content, socket.MSG_DONTWAIT)
    except OSError:
        return CLIENT_LEFT
    return refusal

"""Refusals of an overloaded server, written as soon as a connection is accepted: without a task, and by one write.

A server that is asked for five times what it can compute refuses four of five requests, most of them over connections
of their own. Their share of the event loop is what is missing for the others: a task, a scope and an exchange for each
would take several times what the refusal itself does.

When even so the loop does not keep up, tasks of the addresses that were refused just before are refused unread, for
still less: health checks do not wait behind thousands of refusals.
"""

import contextlib
import logging
import math
import socket
from typing import Any

import trio
from attrs import define, field
from hypercorn.config import Config
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.app import PoolServeApp
from trio_pool_serve.server.arrival import seconds_since_arrival
from trio_pool_serve.server.http_connection import MAX_RECEIVED
from trio_pool_serve.server.incoming_request import BadRequestError, LeftToHypercornError
from trio_pool_serve.server.outgoing_response import OutgoingResponse
from trio_pool_serve.server.request_buffer import RequestBuffer
from trio_pool_serve.server.server_context import ServerContext, address_of

logger = logging.getLogger(__name__)

REFUSAL = b"HTTP/1.1 503 \r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
"""For what is refused unread."""

MAX_LAG_S = 0.25
"""How long after its arrival a request is read at the latest, before some are refused unread."""

REFUSED_AGAIN_S = 1.0
"""For how long an address is refused unread after a refusal: then one of its requests is read, and may be taken."""

MAX_ADDRESSES = 4096
"""That are remembered."""


@define(eq=False)
class EarlyRefusals:
    """Answers the requests of new connections that ``app`` refuses early."""

    app: PoolServeApp
    config: Config
    context: ServerContext
    _refused_at: dict[str, float] = field(init=False, factory=dict)
    """By address."""

    def answer(self, connection: socket.socket, peer: Any) -> tuple[bool, bytes]:
        """Answer the first request of a connection if it has arrived whole, with nothing behind it, and is refused.

        Returns whether the connection is to be closed now, and what has been read of it that is not answered.
        """
        waited_s = seconds_since_arrival(connection)
        if not self.app.is_refusing(waited_s):
            return False, b""
        try:
            received = connection.recv(MAX_RECEIVED, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False, b""
        except OSError:
            return True, b""
        address = address_of(connection.family, peer)
        if waited_s > MAX_LAG_S and self._is_refused_again(address, received):
            self.context.connections.note_refusal()
            with contextlib.suppress(OSError):
                connection.send(REFUSAL, socket.MSG_DONTWAIT)
            return True, b""
        buffer = RequestBuffer(self.config.h11_max_incomplete_size)
        buffer.append(received)
        response = None
        try:
            response = self._response_to(buffer, parse_socket_addr(connection.family, peer), waited_s)
        except (BadRequestError, LeftToHypercornError):
            return False, received
        except Exception as error:
            # Handled as any other request, it ends its own connection only.
            logger.warning("an early refusal failed: %s", type(error).__name__)
            logger.debug("traceback of the early refusal", exc_info=error)
        if response is None:
            return False, received
        self._remember(address, trio.current_time())
        try:
            connection.send(response[0], socket.MSG_DONTWAIT)  # which fits: nothing has been sent yet
        except OSError:
            return True, b""
        return response[1], b""

    def _is_refused_again(self, address: str, received: bytes) -> bool:
        """Return whether a request may be refused unread: a task's, of an address that has just been refused."""
        refused_at = self._refused_at.get(address, -math.inf)
        return received.startswith(b"POST ") and trio.current_time() - refused_at < REFUSED_AGAIN_S

    def _remember(self, address: str, now: float) -> None:
        if len(self._refused_at) >= MAX_ADDRESSES:
            self._refused_at.clear()
        self._refused_at[address] = now

    def _response_to(
        self, buffer: RequestBuffer, client: tuple[str, int] | None, waited_s: float
    ) -> tuple[bytes, bool] | None:
        """Return a response's bytes, and whether it closes the connection; ``None`` for a request to be handled."""
        request = buffer.take_head()
        if request is None:
            return None
        body = buffer.take_body(request)
        if not request.is_complete or buffer.unread:
            return None
        refusal = self.app.refuse_early(request.scope(self.config.root_path, client, waited_s), body)
        if refusal is None:
            return None
        status, headers, content = refusal
        response = OutgoingResponse(request, status, headers)
        head = response.head(self.context.server_headers(self.config).now(), is_last=False)
        return head + response.body(content, is_last=True), response.closes

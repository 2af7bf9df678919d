"""Accepts connections: refuses requests and connections that are above the limits, and serves the others in tasks."""

import contextlib
import errno
import logging
import math
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import define, field
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.server.client_socket import (
    LINGER_S,
    MAX_RECEIVED,
    end_sending,
    has_arrived,
    seconds_since_arrival,
)
from trio_pool_serve.server.http_connection import LAST_REQUEST_S
from trio_pool_serve.server.incoming_request import HTTP2_PREFACE
from trio_pool_serve.server.listening_socket import send_refusal
from trio_pool_serve.server.refusal_writer import CLIENT_LEFT, UNREAD, Refusal, RefusalWriter
from trio_pool_serve.server.server_context import ServerContext
from trio_pool_serve.server.tls import Certificates

logger = logging.getLogger(__name__)

LISTENING_ERRORS = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
"""Errors of the listening socket. Others are of a new connection, such as EPERM of a firewall, or of the system."""

ERROR_PAUSE_S = 0.1

REFUSING_PAUSE_S = 0.02
"""Pause between accepts while connections are refused: waking for each one costs as much as refusing it.

With one API process on two cores and five times its capacity of requests, this raised goodput from 0.7 to 0.8 of the
capacity. With several API processes, the kernel wakes each one for each connection."""

SERVED_AT_ONCE = 4
"""Connections that are served before other tasks, and other processes on the socket, have their turn."""

REFUSED_PER_SERVED = 8
"""Refused connections that take as much of a turn as one served connection."""

PATIENCE_S = 1.0
"""Seconds that a task waits for the next request of a connection before an ``HttpConnection`` is made for it."""

Serve = Callable[[trio.SSLStream[trio.SocketStream] | trio.SocketStream, bytes, float], Awaitable[None]]
"""Serves a connection from which these bytes were read; with TLS, its first request must begin by this time."""


@define(eq=False)
class Acceptor:
    """Accepts connections on ``listening`` and serves each in a task of ``nursery``, with TLS if it has certificates.

    Without TLS, the first requests of connections are refused before that if the context's ``refusals`` refuse them.
    """

    listening: socket.socket
    context: ServerContext
    serve: Serve
    tls: Certificates | None = None
    _refused: deque[tuple[float, socket.socket]] = field(init=False, factory=deque)
    """Refused connections whose clients may still read why, each with the time at which it is closed."""

    async def run(self, nursery: trio.Nursery) -> None:
        """Accept until cancelled. Cancellation: at once; connections that are being served go on."""
        while True:
            # Refused connections are closed in time even if no other arrives.
            with trio.move_on_at(self._refused[0][0] if self._refused else math.inf):
                await trio.lowlevel.wait_readable(self.listening)
            self.close_refused(trio.current_time())
            if pause_s := self._accept_some(nursery):
                await trio.sleep(pause_s)

    def accept_rest(self, nursery: trio.Nursery) -> None:
        """Accept every waiting connection: closing the socket would reset it."""
        with contextlib.suppress(OSError):  # as many as there are file descriptors for
            while self._accept_one(nursery) is not None:
                continue

    def close_refused(self, now: float = math.inf) -> None:
        """Close the refused connections that are due by ``now``."""
        while self._refused and self._refused[0][0] <= now:
            self._refused.popleft()[1].close()

    def _accept_some(self, nursery: trio.Nursery) -> float:
        """Return the seconds to wait before accepting more."""
        left, refused = SERVED_AT_ONCE * REFUSED_PER_SERVED, 0
        try:
            while left > 0:
                is_served = self._accept_one(nursery)
                if is_served is None:
                    return REFUSING_PAUSE_S if refused else 0.0
                # With TLS, the work of a connection is a handshake, and handshakes take turns of their own.
                left -= REFUSED_PER_SERVED if is_served and self.tls is None else 1
                refused += not is_served
        except OSError as error:
            if error.errno in LISTENING_ERRORS:  # no later accept can succeed
                raise
            logger.warning("no connection can be accepted: %s", error)
            return ERROR_PAUSE_S  # no file descriptors are left, for example
        return 0.0

    def _accept_one(self, nursery: trio.Nursery) -> bool | None:
        """Return whether a connection is served or was refused; ``None`` if none is waiting."""
        try:
            connection, peer = self.listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # none waits, or its client has left the queue
            return None
        address = self.context.connections.address_of(peer)
        if self.context.connections.refuses(address):
            send_refusal(connection, is_plain=self.tls is None)
            self._linger(connection)
            return False
        found: Refusal | bytes = b""
        if self.context.refusals is not None and self.tls is None:
            found = self._answer_first(connection, peer, self.context.refusals)
            if isinstance(found, Refusal) and found.closes:
                self._linger(connection)
                return False
        self.context.connections.add(address)  # now: the task begins later
        nursery.start_soon(self._serve, connection, peer, found, address)
        return True

    def _answer_first(self, connection: socket.socket, peer: Any, refusals: RefusalWriter) -> Refusal | bytes:
        """Answer the first request of a connection if it is refused, and has arrived whole with nothing after it.

        Return the refusal; or, if the connection must be served, the bytes read from it.
        """
        # 121 instead of 226 µs of CPU time per refused request if the server closes the connection, 182 instead of 224,
        # with ``_answer_next``, if the client does (python -m benchmarks.refusal_costs, "on acceptance").
        received = _received(connection)
        if not received:
            return b"" if received is None else CLIENT_LEFT
        if received.startswith(HTTP2_PREFACE) and has_arrived(connection, select.POLLRDHUP):
            return CLIENT_LEFT  # as later, in ``ContainedConnection.client_has_left``
        waited_s = seconds_since_arrival(connection)
        client = parse_socket_addr(connection.family, peer)
        address = "" if client is None else client[0]
        if refusals.gate.refuses_unread(received, address, waited_s):
            self.context.connections.on_refusal()  # 70 instead of 121 µs (as above, "reading")
            return _sent(connection, UNREAD)
        if (refusal := refusals.refusal_in(received, client, waited_s)) is None:
            return received
        refusals.gate.note_refused(address)
        return _sent(connection, refusal)

    async def _answer_next(self, connection: socket.socket, peer: Any, refusals: RefusalWriter) -> Refusal | bytes:
        """Answer the requests after a refused one, until one is not refused or none arrives for ``PATIENCE_S``.

        Return as ``_answer_first``; after a refusal the connection is closed. Cancellation: at once.
        """
        client = parse_socket_addr(connection.family, peer)
        with self.context.terminated.waiting(trio.current_time() + PATIENCE_S) as limit:
            while True:
                await trio.lowlevel.wait_readable(connection)
                received = _received(connection)
                if received is None:  # a socket may be reported readable without bytes
                    continue
                if not received:
                    return CLIENT_LEFT
                if (refusal := refusals.refusal_in(received, client, seconds_since_arrival(connection))) is None:
                    return received
                if (sent := _sent(connection, refusal)).closes:
                    return sent
                limit.deadline = trio.current_time() + PATIENCE_S
        return b""

    def _linger(self, connection: socket.socket) -> None:
        """Close the sending half of a connection now, and the rest after its client has had time to read."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)  # to close now would reset it if the client still sends
        self._refused.append((trio.current_time() + LINGER_S, connection))
        if len(self._refused) > self.context.connections.max_refused:
            self._refused.popleft()[1].close()

    async def _serve(self, connection: socket.socket, peer: Any, found: Refusal | bytes, address: str) -> None:
        head_by = trio.current_time() + self.context.connections.client_timeout_s
        try:
            if isinstance(found, Refusal) and self.context.refusals is not None:
                found = await self._answer_next(connection, peer, self.context.refusals)
            if found is not CLIENT_LEFT:
                await self._serve_stream(connection, peer, found, head_by)
        finally:
            # The stream around the socket may have closed it already, or was never made; closing twice is harmless.
            connection.close()
            self.context.connections.add(address, -1)

    async def _serve_stream(self, connection: socket.socket, peer: Any, found: Refusal | bytes, head_by: float) -> None:
        try:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        except OSError:
            return  # the client has left
        if isinstance(found, Refusal):
            await end_sending(stream.socket)
            return
        if self.tls is None:
            await self.serve(stream, found, head_by)
            return
        secured = None
        with self.context.terminated.waiting(head_by, LAST_REQUEST_S):
            secured = await self.tls.begin_tls(stream, hash(peer[:1]))  # without the port
        if secured is not None:
            await self.serve(secured, b"", head_by)


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

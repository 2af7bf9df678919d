"""Accepts the connections of ``trio-pool-serve serve``, and runs the app's lifespan around them.

hypercorn's own listener closes its socket as soon as a shutdown begins. This one goes on accepting until the requests
that were running are answered: clients that connect meanwhile are told 503 instead of being refused by the kernel. It
also refuses connections above the limits before anything is spent on them.
"""

import contextlib
import errno
import logging
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from attrs import define, field
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.lifespan import Lifespan
from hypercorn.typing import LifespanState
from hypercorn.utils import wrap_app

from trio_pool_serve.app import PoolServeApp
from trio_pool_serve.server.contained_connection import LINGER_S, end_sending, serve_connection
from trio_pool_serve.server.early_refusals import LEFT, EarlyRefusals, Refusal
from trio_pool_serve.server.http_connection import LAST_REQUEST_S
from trio_pool_serve.server.listening_socket import say_no
from trio_pool_serve.server.server_context import ServerContext
from trio_pool_serve.server.tls import Certificates

logger = logging.getLogger(__name__)

CAPACITY_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

CAPACITY_PAUSE_S = 0.1

REFUSING_PAUSE_S = 0.02
"""Between accepting while connections are refused: to wake for each one costs as much as to refuse it.

With one API process on two cores, asked for five times its capacity, this raised goodput from 0.7 of it to 0.8. Of
several the kernel wakes each one for each connection."""

SERVED_AT_ONCE = 4
"""Connections that are served before others have their turn: other tasks, and other processes on the socket."""

REFUSED_PER_SERVED = 8
"""Refused connections that take as much of a turn as one that is served, which others then have to wait for."""

Serve = Callable[[trio.SSLStream[trio.SocketStream] | trio.SocketStream, bytes, float], Awaitable[None]]
"""Serves a connection, of which those bytes have been read; by TLS its first request has to begin by that time."""


@define(eq=False)
class Acceptor:
    """Accepts connections on ``listening`` and serves each in a task of ``nursery``, with TLS if it has certificates.

    Without TLS, ``early_refusals`` answer what they can before that.
    """

    listening: socket.socket
    context: ServerContext
    serve: Serve
    tls: Certificates | None = None
    early_refusals: EarlyRefusals | None = None
    _refused: deque[tuple[float, socket.socket]] = field(init=False, factory=deque)
    """Connections whose clients have time to read why they are refused, and when that is over."""

    async def run(self, nursery: trio.Nursery) -> None:
        """Accept until cancelled. Cancellation: at once; connections that are being served go on."""
        while True:
            with trio.move_on_at(self._refused[0][0] if self._refused else math.inf):
                await trio.lowlevel.wait_readable(self.listening)
            self.close_refused(trio.current_time())
            if pause_s := self._accept_some(nursery):
                await trio.sleep(pause_s)

    def accept_rest(self, nursery: trio.Nursery) -> None:
        """Accept what has connected; what is left when the socket is closed would be reset."""
        with contextlib.suppress(OSError):  # as many as there are file descriptors for
            while self._accept_one(nursery) is not None:
                continue

    def close_refused(self, now: float = math.inf) -> None:
        """Close the refused connections that are still open and whose time is over by ``now``."""
        while self._refused and self._refused[0][0] <= now:
            self._refused.popleft()[1].close()

    def _accept_some(self, nursery: trio.Nursery) -> float:
        """Return for how many seconds to wait before accepting more."""
        left, refused = SERVED_AT_ONCE * REFUSED_PER_SERVED, 0
        try:
            while left > 0:
                is_served = self._accept_one(nursery)
                if is_served is None:
                    return REFUSING_PAUSE_S if refused else 0.0
                left -= REFUSED_PER_SERVED if is_served and self.tls is None else 1  # handshakes have turns
                refused += not is_served
        except OSError as error:
            if error.errno not in CAPACITY_ERRORS:
                raise
            logger.warning("no connection can be accepted: %s", error)
            return CAPACITY_PAUSE_S  # there are no file descriptors left, for example
        return 0.0

    def _accept_one(self, nursery: trio.Nursery) -> bool | None:
        """Return whether a connection is served, or has been refused; ``None`` if there is none to accept."""
        try:
            connection, peer = self.listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        if self.context.connections.refuses():
            say_no(connection, is_plain=self.tls is None)
            self._linger(connection)
            return False
        found: Refusal | bytes = b""
        if self.early_refusals is not None and self.tls is None:
            found = self.early_refusals.answer(connection, peer)
            if isinstance(found, Refusal) and found.closes:
                self._linger(connection)
                return False
        self.context.connections.open += 1  # now: the task begins later
        nursery.start_soon(self._serve, connection, peer, found)
        return True

    def _linger(self, connection: socket.socket) -> None:
        """Close a connection's sending half now, and the rest when its client has had time to read."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        self._refused.append((trio.current_time() + LINGER_S, connection))
        if len(self._refused) > self.context.connections.limits.max_refused:
            self._refused.popleft()[1].close()

    async def _serve(self, connection: socket.socket, peer: Any, found: Refusal | bytes) -> None:
        head_by = trio.current_time() + self.context.connections.limits.client_timeout_s
        try:
            if isinstance(found, Refusal) and self.early_refusals is not None:
                found = await self.early_refusals.answer_next(connection, peer)
            if found is not LEFT:
                await self._serve_stream(connection, peer, found, head_by)
        finally:
            connection.close()
            self.context.connections.open -= 1

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
            secured = await self.tls.begin_tls(stream, hash(peer[:1]))  # the port is left out
        if secured is not None:
            await self.serve(secured, b"", head_by)


async def serve_app(
    app: Any,
    settings: HypercornConfig,
    context: ServerContext,
    listening: socket.socket,
    stop: trio.Event,
    *,
    tls: Certificates | None = None,
    refusing: PoolServeApp | None = None,
) -> None:
    """Serve an app on a listening socket until ``stop`` is set, and all that was running then is answered.

    ``refusing`` is asked first about requests over new connections, if they are without TLS.
    Connections that are accepted meanwhile are served too, for one request each. Running requests are given
    ``settings.graceful_timeout`` seconds. Cancellation: at once, but for what hypercorn is writing.
    """
    state: LifespanState = {}
    wrapped = wrap_app(app, settings.wsgi_max_body_size, "asgi")
    lifespan = Lifespan(wrapped, settings, state)
    early = None if refusing is None else EarlyRefusals(refusing, settings, context)
    serve = partial(serve_connection, wrapped, settings, context, state, refusals=early)
    acceptor = Acceptor(listening, context, serve, tls, early)
    async with trio.open_nursery() as lifespan_nursery:
        await lifespan_nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        try:
            await _serve_until(stop, acceptor, settings.graceful_timeout)
        finally:
            acceptor.close_refused()
        await lifespan.wait_for_shutdown()
        lifespan_nursery.cancel_scope.cancel(reason="the app has shut down")


async def _serve_until(stop: trio.Event, acceptor: Acceptor, drain_timeout_s: float) -> None:
    """Serve until ``stop`` is set; then go on until the connections of before, the early ones, have ended."""
    async with trio.open_nursery() as late, trio.open_nursery() as background:
        async with trio.open_nursery() as early:
            with trio.CancelScope() as before:
                background.start_soon(_cancel_when, stop, before)
                await acceptor.run(early)
            early.cancel_scope.deadline = late.cancel_scope.deadline = trio.current_time() + drain_timeout_s
            await acceptor.context.terminated.set()
            background.start_soon(acceptor.run, late)
        background.cancel_scope.cancel(reason="what was running has been answered")
        acceptor.accept_rest(late)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel(reason="the server shuts down")

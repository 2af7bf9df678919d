"""The listener of ``trio-pool-serve serve``: accepts connections, runs the app's lifespan, and restarts after a crash.

hypercorn's own listener closes its socket as soon as a shutdown begins. This one accepts connections until the running
requests are answered: new clients get 503 instead of being refused by the kernel. It also refuses connections above the
limits before anything is spent on them.
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

from trio_pool_serve.app import PoolServeApp, create_app
from trio_pool_serve.config import Config
from trio_pool_serve.processes.child_process import RestartBackoff
from trio_pool_serve.server.client_socket import LINGER_S, end_sending
from trio_pool_serve.server.contained_connection import serve_connection
from trio_pool_serve.server.early_refusals import CLIENT_LEFT, EarlyRefusals, Refusal
from trio_pool_serve.server.http_connection import LAST_REQUEST_S
from trio_pool_serve.server.listening_socket import send_refusal
from trio_pool_serve.server.server_context import Connections, ServerContext
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.service import Service

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

RESTART_PAUSES_S = (0.0, 0.01, 0.05, 0.1, 0.25)
"""Well under a second: the models are loaded and the socket is open, so clients only wait."""

STABLE_AFTER_S = 10.0

Serve = Callable[[trio.SSLStream[trio.SocketStream] | trio.SocketStream, bytes, float], Awaitable[None]]
"""Serves a connection from which these bytes were read; with TLS, its first request must begin by this time."""


@define(eq=False)
class Acceptor:
    """Accepts connections on ``listening`` and serves each in a task of ``nursery``, with TLS if it has certificates.

    Without TLS, ``early_refusals`` answer requests before that if they can.
    """

    listening: socket.socket
    context: ServerContext
    serve: Serve
    tls: Certificates | None = None
    early_refusals: EarlyRefusals | None = None
    _refused: deque[tuple[float, socket.socket]] = field(init=False, factory=deque)
    """Refused connections whose clients may still read why, each with the time at which it is closed."""

    async def run(self, nursery: trio.Nursery) -> None:
        """Accept until cancelled. Cancellation: at once; connections that are being served go on."""
        while True:
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
                left -= REFUSED_PER_SERVED if is_served and self.tls is None else 1  # handshakes have turns
                refused += not is_served
        except OSError as error:
            if error.errno in LISTENING_ERRORS:
                raise
            logger.warning("no connection can be accepted: %s", error)
            return ERROR_PAUSE_S  # no file descriptors are left, for example
        return 0.0

    def _accept_one(self, nursery: trio.Nursery) -> bool | None:
        """Return whether a connection is served or was refused; ``None`` if none is waiting."""
        try:
            connection, peer = self.listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        address = self.context.connections.address_of(peer)
        if self.context.connections.refuses(address):
            send_refusal(connection, is_plain=self.tls is None)
            self._linger(connection)
            return False
        found: Refusal | bytes = b""
        if self.early_refusals is not None and self.tls is None:
            found = self.early_refusals.answer(connection, peer)
            if isinstance(found, Refusal) and found.closes:
                self._linger(connection)
                return False
        self.context.connections.add(address)  # now: the task begins later
        nursery.start_soon(self._serve, connection, peer, found, address)
        return True

    def _linger(self, connection: socket.socket) -> None:
        """Close the sending half of a connection now, and the rest after its client has had time to read."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        self._refused.append((trio.current_time() + LINGER_S, connection))
        if len(self._refused) > self.context.connections.max_refused:
            self._refused.popleft()[1].close()

    async def _serve(self, connection: socket.socket, peer: Any, found: Refusal | bytes, address: str) -> None:
        head_by = trio.current_time() + self.context.connections.client_timeout_s
        try:
            if isinstance(found, Refusal) and self.early_refusals is not None:
                found = await self.early_refusals.answer_next(connection, peer)
            if found is not CLIENT_LEFT:
                await self._serve_stream(connection, peer, found, head_by)
        finally:
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
    """Serve an app on a listening socket until ``stop`` is set and all requests running at that time are answered.

    ``refusing`` is asked first about requests on new connections without TLS. Connections accepted after ``stop`` are
    served for one request each. Running requests get ``settings.graceful_timeout`` seconds. Cancellation: at once,
    except for hypercorn's writes.
    """
    state: LifespanState = {}
    wrapped = wrap_app(app, settings.wsgi_max_body_size, "asgi")
    lifespan = Lifespan(wrapped, settings, state)
    early = None if refusing is None else EarlyRefusals(refusing, settings, context)
    acceptor = Acceptor(
        listening,
        context,
        partial(serve_connection, wrapped, settings, context, state, refusals=early),
        tls,
        early,
    )
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
    """Serve until ``stop`` is set, then until the earlier connections have ended."""

    async def stop_accepting(accepting: trio.CancelScope) -> None:
        await stop.wait()
        accepting.cancel(reason="the server shuts down")

    async with trio.open_nursery() as late, trio.open_nursery() as background:
        async with trio.open_nursery() as early:
            with trio.CancelScope() as accepting:
                background.start_soon(stop_accepting, accepting)
                await acceptor.run(early)
            early.cancel_scope.deadline = late.cancel_scope.deadline = trio.current_time() + drain_timeout_s
            await acceptor.context.terminated.set()
            background.start_soon(acceptor.run, late)
        background.cancel_scope.cancel(reason="all running requests are answered")
        acceptor.accept_rest(late)


def hypercorn_config(config: Config) -> HypercornConfig:
    """Return hypercorn's settings for the connections of a listener."""
    settings = HypercornConfig()
    # ``drain`` counts the requests that still run, and exits, before they are cancelled.
    settings.graceful_timeout = config.time_limits.drain_timeout_s + 1.0
    settings.keep_alive_timeout = 75
    settings.keep_alive_max_requests = 1_000_000  # the default of 1000 closes busy connections
    settings.include_server_header = False
    settings.errorlog = logging.getLogger("hypercorn.error")
    return settings


async def serve_listeners(
    service: Service, listening: socket.socket, stop: trio.Event, tls: Certificates | None
) -> None:
    """Serve on the socket until ``stop`` is set, then drain; after a crash, with a new listener and a new app.

    Cancellation: at once, except for hypercorn's writes.
    """
    settings, connections = hypercorn_config(service.config), Connections.of(service)
    backoff = RestartBackoff(RESTART_PAUSES_S, STABLE_AFTER_S)
    while not stop.is_set():
        began = trio.current_time()
        try:
            # A new app each time: one cannot start twice.
            app, context = create_app(service.config, service), ServerContext(connections=connections)
            await serve_app(app, settings, context, listening, stop, tls=tls, refusing=app)
        except Exception as error:
            service.metrics.listener_restarts.inc()
            logger.warning("the listener crashed; it restarts", exc_info=error)
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))

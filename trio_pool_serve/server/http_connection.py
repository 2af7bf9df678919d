"""One HTTP/1.x connection, with one task for all of its requests, or three once a request has waited."""

import os
import time
from contextvars import copy_context
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.typing import AppWrapper, LifespanState
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.api.http.connection import EXCHANGE
from trio_pool_serve.server.client_socket import MAX_RECEIVED, has_arrived, seconds_since_arrival, wait_until_gone
from trio_pool_serve.server.exchange import Exchange, call_in_context
from trio_pool_serve.server.incoming_request import BadRequestError, LeftToHypercornError, RequestBuffer
from trio_pool_serve.server.outgoing_response import (
    BEGINNING,
    REFUSAL_HEADERS,
    OutgoingResponse,
    head_bytes,
    server_headers,
)
from trio_pool_serve.server.server_context import WRITE_PIECE, ServerContext

LAST_REQUEST_S = 1.0
"""Seconds within which a new connection must send its request while the server shuts down."""


class HttpConnection:
    """Reads the requests of a connection, runs the app for each, and writes the responses.

    One task does all of it until a request first waits. From then on a second task reads, and a third closes the
    connection when it is idle for too long or the server shuts down. So a connection whose requests are refused costs
    one task, one whose requests are computed three, and no request costs one of its own. The reader goes on reading
    while a request runs, so it notices when the client leaves; but it stops at the first byte of the next request,
    until the running one is answered.

    Requests that the context's ``refusals`` answer get no exchange, and the app does not see them.

    Anything but plain HTTP/1.x is left to hypercorn. ``received`` are bytes that the acceptor has read.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: ServerContext,
        state: LifespanState,
        stream: trio.SocketStream,
        received: bytes = b"",
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._state = state
        self._stream = stream
        self._socket = stream.socket
        self._client = parse_socket_addr(self._socket.family, self._socket.getpeername())
        self._server = parse_socket_addr(self._socket.family, self._socket.getsockname())
        self._buffer = RequestBuffer(config.h11_max_incomplete_size, received)
        # For the next request. The acceptor has read ``received``, and asked about the first request already.
        self._refusals = None if received else context.refusals
        self._exchange: Exchange | None = None
        self._requests = 0
        self._requests_scope = trio.CancelScope()  # cancelled when the client leaves; one for each request costs more
        self._idle_since = self._head_since = trio.current_time()
        self._arrived = trio.Event()  # a request, or the end
        self._answered = trio.Event()
        self._has_reader = False
        self.has_ended = False  # the client sends no more, so closing cannot reset the connection
        self._is_gone = False  # the client cannot even receive a response
        self._refused_with: int | None = None
        self._is_left_to_hypercorn = False
        self._is_closing = False  # a refusal was the last response, so no request is taken
        self._is_writable = True
        self._has_begun_response = False
        self._probe_bytes = 0  # the beginning of the current response that has been sent already

    async def run(self) -> bytes | None:
        """Serve the connection until the caller must close it, and return ``None``.

        If it is left to hypercorn, return the bytes with which hypercorn begins. Cancellation: at once.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with self._requests_scope:
                await self._serve_requests()
            if self._refused_with is not None:  # outside the scope, which a wrong body cancels
                await self._refuse(self._refused_with)
            nursery.cancel_scope.cancel(reason="the connection has ended")
        return self._buffer.unread if self._is_left_to_hypercorn else None

    # -- reading ----------------------------------------------------------------------------------------------------

    async def _next_exchange(self) -> Exchange | None:
        """Return the next request; ``None`` if the connection must be closed or left to hypercorn."""
        if self._has_reader:
            await self._arrived.wait()
            self._arrived = trio.Event()
            return self._exchange
        try:
            if self._buffer.unread:
                await trio.lowlevel.checkpoint()  # other tasks' turn, between requests that arrived at once
            while (exchange := await self._take_request()) is None:
                if self._is_closing or not (data := await self._receive_while_idle()):
                    return None
                self._append(data)
            if not exchange.request.is_complete:
                self._start_reader()  # for the rest of the body
        except (BadRequestError, LeftToHypercornError) as error:
            self._stop_reading(error)
            return None
        return exchange

    async def _receive_while_idle(self) -> bytes:
        """Return the bytes that have arrived; empty at the end, or if the connection is idle for too long."""
        # Only the first request is likely to have arrived already: a later one follows the response.
        data = self._receive_nowait() if not self._requests else None
        if data is None:
            # A connection that was accepted just before the shutdown may still send its first request.
            grace_s = 0.0 if self._requests else LAST_REQUEST_S
            with self._context.terminated.waiting(self._closes_at(), grace_s):
                data = await self._receive()
        if data is None:  # the time is over: only bytes that have arrived by now count
            data = self._receive_nowait()
        if data is None:
            self._refuse_slow_head()
        self.has_ended |= data == b""
        return data or b""

    def _refuse_slow_head(self) -> None:
        # Without a byte of a head, the client waits for no response: the connection is closed without one.
        if self._buffer.unread and not self._context.terminated.is_set():
            self._refused_with = 408

    def _closes_at(self) -> float:
        """Return the time at which the connection is closed if nothing arrives and no request is running."""
        limit_s, since = self._config.keep_alive_timeout, self._idle_since
        if self._buffer.unread:
            limit_s = self._context.connections.client_timeout_s
            # A head that began to arrive during an earlier request has its whole time once that is answered.
            since = max(self._head_since, self._idle_since)
        elif self._context.terminated.is_set():
            limit_s = LAST_REQUEST_S  # ``terminated.waiting`` ends only blocks that began before the shutdown
        return since + limit_s

    def _append(self, data: bytes) -> None:
        if not self._buffer.unread and self._exchange is None:
            self._head_since = trio.current_time()
        self._buffer.append(data)

    def _receive_nowait(self) -> bytes | None:
        """Return the bytes that have arrived; empty if the client sends no more, ``None`` if none have arrived."""
        try:
            return os.read(self._socket.fileno(), MAX_RECEIVED)
        except BlockingIOError:
            return None
        except OSError:
            self._is_gone = True
            return b""

    async def _receive(self) -> bytes:
        """Return the next bytes; empty if the client has closed its sending half, or is gone."""
        while True:
            try:
                # trio's streams first try to read, which nearly always fails, and then give up a turn of the loop.
                await trio.lowlevel.wait_readable(self._socket)
            except (OSError, trio.ClosedResourceError):
                self._is_gone = True
                return b""
            if (data := self._receive_nowait()) is not None:
                return data

    def _stop_reading(self, error: BadRequestError | LeftToHypercornError) -> None:
        if isinstance(error, LeftToHypercornError):
            self._is_left_to_hypercorn = True
        elif self._exchange is None or self._exchange.response is None:
            self._refused_with = error.status  # once a response has begun, no other status can be sent

    # -- the task that reads, once a request has waited ---------------------------------------------------------------

    def _start_reader(self) -> None:
        if not self._has_reader:
            self._has_reader = True
            self._nursery.start_soon(self._read)
            self._nursery.start_soon(self._wait_until_idle, self._nursery.cancel_scope)

    async def _read(self) -> None:
        try:
            await self._distribute()
            while data := await self._receive():
                self._append(data)
                await self._distribute()
        except (BadRequestError, LeftToHypercornError) as error:
            self._is_gone = True
            self._stop_reading(error)
        self.has_ended = True
        self._arrived.set()
        if (exchange := self._exchange) is not None:
            # A client that closes after the response has begun counts as gone: no probe can be sent any more.
            if exchange.request.is_complete and not self._is_gone and not self._has_begun_response:
                await wait_until_gone(self._socket, self._send_probe)
            exchange.leave()

    async def _distribute(self) -> None:
        """Give the bytes that have arrived to their requests, one after the other."""
        while True:
            exchange = self._exchange
            if exchange is None:
                exchange = await self._take_request()
                if exchange is not None or self._is_closing:
                    self._arrived.set()
                if exchange is None:
                    return
            elif not exchange.request.is_complete:
                self._deliver(exchange, self._buffer.take_body(exchange.request))
            request = exchange.request
            if not request.is_complete:
                await exchange.wait_for_room()
            if not request.is_complete or not self._buffer.unread:
                return
            # The request may have been answered while this task waited for room.
            if self._exchange is exchange:
                self._answered = trio.Event()
                await self._answered.wait()

    async def _take_request(self) -> Exchange | None:
        """Return an exchange for the next request that is not refused; ``None`` if its head has not arrived."""
        while not self._is_closing and (request := self._buffer.take_head()) is not None:
            waited_s = seconds_since_arrival(self._socket)
            if self._requests:  # bytes that arrived during an earlier request waited for that one
                waited_s = min(waited_s, trio.current_time() - self._idle_since)
            self._requests += 1
            await self._context.mark_request()
            # A chunked body may be wrong: it is taken once there is an exchange, which the error is for.
            body = b"" if request.is_chunked else self._buffer.take_body(request)
            refusals, self._refusals = self._refusals, self._context.refusals
            # 137 instead of 387 µs of CPU time per refused request (benchmarks.refusal_costs, "on connections").
            if refusals is not None and (
                refusal := refusals.refusal_of(request, body, self._client, waited_s, self._is_last)
            ):
                await self._write(refusal.content)
                self._idle_since = trio.current_time()
                self._is_closing = refusal.closes or not self._is_writable
                if self._buffer.unread:
                    await trio.lowlevel.checkpoint()  # other tasks' turn
                continue
            exchange = self._exchange = Exchange(
                request, waited_s, self._config, self._is_last, self._write_response, self._requests_scope
            )
            self._deliver(exchange, body or self._buffer.take_body(request))
            return exchange
        return None

    def _deliver(self, exchange: Exchange, body: bytes) -> None:
        """Give a request a part of its body, and the body's end if the request is complete."""
        if body or exchange.request.is_complete:
            exchange.take(body, is_last=exchange.request.is_complete)

    # -- the task that runs the app ---------------------------------------------------------------------------------

    async def _serve_requests(self) -> None:
        context = copy_context()
        while (exchange := await self._next_exchange()) is not None:
            # Each request has a context of its own: a proxy sends requests of many clients on one connection.
            await call_in_context(self._respond(exchange), context.copy(), self._start_reader)
            exchange.end()
            if self._refused_with is not None:
                break
            if not self._stays_open_after(exchange):
                return
            self._exchange = None
            self._has_begun_response = False
            self._idle_since = trio.current_time()
            self._answered.set()

    async def _respond(self, exchange: Exchange) -> None:
        began = time.time()
        scope: Any = exchange.request.scope(self._config.root_path, self._client, exchange.waited_s)
        scope |= {"server": self._server, "state": self._state.copy()}
        scope["extensions"][EXCHANGE] = exchange
        if exchange.request.expects_continue:
            await self._write(head_bytes(100, server_headers(self._config)))
        try:
            await self._app(scope, exchange.receive, exchange.send, trio.to_thread.run_sync, trio.from_thread.run)
        except Exception:
            # As in hypercorn, only the log has the reason.
            await self._config.log.exception("Error in ASGI Framework")
        finally:
            response = exchange.response
            summary = {"status": 500, "headers": []} if response is None else response.summary
            await self._config.log.access(scope, summary, time.time() - began)
        if response is None and not exchange.has_left:
            await self._refuse(500)

    def _stays_open_after(self, exchange: Exchange) -> bool:
        """Return whether the connection stays open for another request."""
        return (
            exchange.is_answered
            and exchange.response is not None
            and not exchange.response.closes
            and exchange.request.is_complete
            and self._is_writable
            and not self.has_ended
            and not self._context.terminated.is_set()
        )

    def _is_last(self) -> bool:
        return (
            self.has_ended
            or self._context.terminated.is_set()
            or self._requests >= self._config.keep_alive_max_requests
        )

    async def _refuse(self, status: int) -> None:
        headers = server_headers(self._config)
        if self._exchange is None:
            head = head_bytes(status, [*REFUSAL_HEADERS, *headers])
        else:
            head = OutgoingResponse(self._exchange.request, status, REFUSAL_HEADERS).head(headers, is_last=False)
        await self._write(head)

    async def _write_response(self, *parts: bytes) -> None:
        if self._refused_with is None:
            self._has_begun_response = True
            await self._write(*parts)

    def _send_probe(self) -> None:
        """Send the next byte of ``BEGINNING``, unless the response has begun."""
        if self._has_begun_response or not self._is_writable or self._probe_bytes == len(BEGINNING):
            return
        try:
            self._probe_bytes += os.write(self._socket.fileno(), BEGINNING[self._probe_bytes :][:1])
        except BlockingIOError:
            return
        except OSError:
            self._give_up_writing()

    async def _write(self, *parts: bytes) -> None:
        """Write to the client, with one system call if there is room. Nothing is written after a failure.

        A client that reads too slowly counts as gone. Cancellation: at once while there is no room; nothing more is
        written then.
        """
        if not self._is_writable:
            return
        if self._probe_bytes:
            parts = (parts[0][self._probe_bytes :], *parts[1:])
            self._probe_bytes = 0
        try:
            written = os.writev(self._socket.fileno(), parts)
        except BlockingIOError:
            written = 0
        except OSError:
            self._give_up_writing()
            return
        if written == sum(map(len, parts)):
            return
        self._is_writable = False  # if this is cancelled midway, nothing may follow a part of a response
        try:
            for part in parts:
                for begin in range(written, len(part), WRITE_PIECE):
                    with trio.fail_after(self._context.connections.client_timeout_s):
                        await self._stream.send_all(memoryview(part)[begin : begin + WRITE_PIECE])
                written = max(0, written - len(part))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._give_up_writing()
        else:
            self._is_writable = True

    def _give_up_writing(self) -> None:
        self._is_writable = False
        if self._exchange is not None:
            self._exchange.leave()

    # -- the task that closes the connection ------------------------------------------------------------------------

    async def _wait_until_idle(self, connection: trio.CancelScope) -> None:
        """Cancel the connection when it is idle for too long, or idle while the server shuts down.

        A response does not restart the timer. When the timer expires, the time of the last response decides.
        """
        shutdown = self._context.terminated
        # Neither timeout wakes this task when it begins, so it wakes up after the shorter one.
        step_s = min(self._config.keep_alive_timeout, self._context.connections.client_timeout_s)
        until = trio.current_time() + step_s
        while not shutdown.is_set() and until > trio.current_time():
            with trio.move_on_at(until):
                await shutdown.wait()
            soon = trio.current_time() + step_s
            until = soon if self._exchange is not None else min(soon, self._closes_at())
        while self._exchange is None and has_arrived(self._socket):
            await trio.lowlevel.checkpoint()  # the reader's turn
        # A running request is answered first; its task checks for the shutdown afterwards.
        if self._exchange is None:
            self._refuse_slow_head()
            if self._refused_with is not None:
                await self._refuse(self._refused_with)
            connection.cancel(reason="the connection is idle")

"""One HTTP/1.x connection: three tasks for all of its requests, and none for each."""

import os
import time
from contextvars import copy_context
from typing import Any
from urllib.parse import unquote

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, LifespanState
from hypercorn.utils import parse_socket_addr

from trio_pool_serve.api.http.connection import DELIVER_TO
from trio_pool_serve.server.exchange import Exchange
from trio_pool_serve.server.incoming_request import BadRequestError, IncomingRequest, LeftToHypercornError
from trio_pool_serve.server.outgoing_response import REFUSAL, OutgoingResponse, ServerHeaders, head_bytes
from trio_pool_serve.server.request_buffer import RequestBuffer

MAX_RECEIVED = 2**16
"""Bytes that are read at once, and so the most that can have been read behind a request that is running."""


class HttpConnection:
    """Reads the requests of a connection, runs the app for each, and writes the responses.

    One task reads, one runs the app, and one closes the connection when it is idle for long or the server shuts down.
    The app's task waits for a request and the reader for bytes: a request wakes each of them once, and needs no task,
    channel or nursery of its own. The reader goes on reading while a request runs, and so sees the client leave; but
    not while there are bytes behind that request, which are not read before it is answered.

    What is not plain HTTP/1.x is left to hypercorn: ``run`` returns then.
    """

    def __init__(
        self, app: AppWrapper, config: Config, context: WorkerContext, state: LifespanState, stream: trio.SocketStream
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._state = state
        self._stream = stream
        self._socket = stream.socket
        self._client = parse_socket_addr(self._socket.family, self._socket.getpeername())
        self._server = parse_socket_addr(self._socket.family, self._socket.getsockname())
        self._server_headers = ServerHeaders(config)
        self._buffer = RequestBuffer(config.h11_max_incomplete_size)
        self._exchange: Exchange | None = None
        self._requests = 0
        self._idle_since = trio.current_time()
        self._arrived = trio.Event()  # a request, or the end
        self._answered = trio.Event()
        self._has_ended = False  # no more requests come
        self._refused_with: int | None = None
        self._is_left_to_hypercorn = False
        self._is_writable = True

    async def run(self) -> bytes | None:
        """Serve the connection until it is to be closed, by the caller. Cancellation: at once.

        Returns the bytes that hypercorn is to go on with, or ``None``.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read)
            nursery.start_soon(self._wait_until_idle, nursery.cancel_scope)
            await self._serve_requests()
            nursery.cancel_scope.cancel(reason="the connection has ended")
        return self._buffer.unread if self._is_left_to_hypercorn else None

    # -- the task that reads ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while data := await self._receive():
                self._buffer.append(data)
                await self._distribute()
        except BadRequestError as error:
            if self._exchange is None or self._exchange.response is None:
                self._refused_with = error.status
        except LeftToHypercornError:
            self._is_left_to_hypercorn = True
        self._has_ended = True
        self._arrived.set()
        if self._exchange is not None:
            self._exchange.leave()

    async def _receive(self) -> bytes:
        """Return what has arrived; nothing if the client has closed its sending half, or is gone."""
        while True:
            try:
                await trio.lowlevel.wait_readable(self._socket)
                # Without the attempt before waiting, which nearly always fails, and the one turn of the loop behind
                # it, that trio's streams make.
                return os.read(self._socket.fileno(), MAX_RECEIVED)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                return b""

    async def _distribute(self) -> None:
        """Give all that has arrived to the requests that it belongs to, one after the other."""
        while True:
            exchange = self._exchange
            if exchange is None:
                request = self._buffer.take_head()
                if request is None:
                    return
                exchange = self._exchange = await self._begin(request)
            request = exchange.request
            if not request.is_complete:
                body = self._buffer.take_body(request)
                if body or request.is_complete:
                    exchange.take(body, is_last=request.is_complete)
                    await exchange.wait_for_room()
            if not request.is_complete or not self._buffer.unread:
                return
            if self._exchange is exchange:
                self._answered = trio.Event()
                await self._answered.wait()

    async def _begin(self, request: IncomingRequest) -> Exchange:
        """Return the exchange that ``request`` opens, and wake the task that runs the app."""
        exchange = Exchange(request, self._server_headers, self._is_last, self._write_response)
        if request.is_complete:
            exchange.take(b"", is_last=True)
        self._requests += 1
        await self._context.mark_request()
        self._arrived.set()
        return exchange

    # -- the task that runs the app ---------------------------------------------------------------------------------

    async def _serve_requests(self) -> None:
        context = copy_context()
        while True:
            # The context of the last request must not be seen by the next: a proxy sends those of many clients.
            trio.lowlevel.current_task().context = context.copy()
            await self._arrived.wait()
            exchange = self._exchange
            if exchange is None:
                break
            self._arrived = trio.Event()
            await self._respond(exchange)
            if self._refused_with is not None:
                break
            if not self._goes_on_behind(exchange):
                return
            self._exchange = None
            self._idle_since = trio.current_time()
            self._answered.set()
        if self._refused_with is not None:
            await self._refuse(self._refused_with)

    async def _respond(self, exchange: Exchange) -> None:
        began = time.time()
        scope = self._scope_of(exchange)
        if exchange.request.expects_continue:
            await self._write(head_bytes(100, self._server_headers.now()))
        try:
            await self._app(scope, exchange.receive, exchange.send, trio.to_thread.run_sync, trio.from_thread.run)
        except Exception:
            # As hypercorn, which says no more to the client, either.
            await self._config.log.exception("Error in ASGI Framework")
        response = exchange.response
        if response is None and not self._has_ended:
            await self._refuse(500)
        summary = {"status": 500, "headers": []} if response is None else response.summary
        await self._config.log.access(scope, summary, time.time() - began)

    def _goes_on_behind(self, exchange: Exchange) -> bool:
        """Whether the connection stays open for another request."""
        return (
            exchange.is_answered
            and exchange.response is not None
            and not exchange.response.closes
            and exchange.request.is_complete
            and self._is_writable
            and not self._has_ended
            and not self._context.terminated.is_set()
        )

    def _is_last(self) -> bool:
        return self._requests >= self._config.keep_alive_max_requests or self._context.terminated.is_set()

    def _scope_of(self, exchange: Exchange) -> Any:
        request = exchange.request
        path, _, query_string = request.target.partition(b"?")
        return {
            "type": "http",
            "http_version": request.http_version,
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": request.method,
            "scheme": "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query_string,
            "root_path": self._config.root_path,
            "headers": request.headers,
            "client": self._client,
            "server": self._server,
            "state": self._state.copy(),
            "extensions": {DELIVER_TO: exchange.deliver_to},
        }

    async def _refuse(self, status: int) -> None:
        headers = self._server_headers.now()
        if self._exchange is None:
            head = head_bytes(status, [*REFUSAL, *headers])
        else:
            head = OutgoingResponse(self._exchange.request, status, REFUSAL).head(headers, is_last=False)
        await self._write(head)

    async def _write_response(self, *parts: bytes) -> None:
        if self._refused_with is None:
            await self._write(*parts)

    async def _write(self, *parts: bytes) -> None:
        """Write to the client, by one system call if there is room; after a failure nothing more is written.

        Cancellation: at once while there is no room; nothing more is written then.
        """
        if not self._is_writable:
            return
        try:
            written = os.writev(self._socket.fileno(), parts)
        except BlockingIOError:
            written = 0
        except OSError:
            self._give_up_writing()
            return
        if written == sum(map(len, parts)):
            return
        self._is_writable = False  # until all of it has been written
        try:
            for part in parts:
                if written < len(part):
                    await self._stream.send_all(memoryview(part)[written:])
                written = max(0, written - len(part))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._give_up_writing()
        else:
            self._is_writable = True

    def _give_up_writing(self) -> None:
        self._is_writable = False
        if self._exchange is not None:
            self._exchange.leave()

    # -- the task that closes the connection ------------------------------------------------------------------------

    async def _wait_until_idle(self, connection: trio.CancelScope) -> None:
        """Cancel the connection when it has been idle for too long, or is idle while the server shuts down.

        It looks at the time of the last response when the time is over, and not whenever there is a response.
        """
        timeout_s = self._config.keep_alive_timeout
        until = self._idle_since + timeout_s
        while not self._context.terminated.is_set() and until > trio.current_time():
            with trio.move_on_at(until):
                await self._context.terminated.wait()
            until = (trio.current_time() if self._exchange is not None else self._idle_since) + timeout_s
        # A request that is running is answered first; the task that runs it looks for the shutdown then.
        if self._exchange is None:
            connection.cancel(reason="the connection is idle")

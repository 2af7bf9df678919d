"""Connections whose exceptions are contained: plain HTTP/1.x is read by us, everything else by hypercorn.

hypercorn serves all connections of a worker in one nursery, and some clients can make its protocol code raise: HTTP/2
frames after the end of a response, bytes after a websocket handshake. The exception would cancel all other connections.
A client that disconnects just as its response ends can leave a connection open and unread for the whole keep-alive
time. And when the server shuts down, a connection that is closed after its last response waits for another request,
until the server stops waiting for it.
"""

import contextlib
import logging
import math
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import h11
import hypercorn.protocol
import hypercorn.trio.run
import trio
from attrs import define, field
from h2.errors import ErrorCodes
from h2.events import StreamReset
from h2.exceptions import ProtocolError
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper

from trio_pool_serve.app import PoolServeApp
from trio_pool_serve.errors import unwrap_exception_groups
from trio_pool_serve.server.client_socket import end_sending, has_arrived
from trio_pool_serve.server.http2_protocol import Http2Protocol
from trio_pool_serve.server.http_connection import LAST_REQUEST_S, HttpConnection
from trio_pool_serve.server.incoming_request import HTTP2_PREFACE, MAX_HEADERS
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import WRITE_PIECE, Connections, ServerContext

CLOSE_TIMEOUT_S = 5.0
"""Seconds that closing may take, and that a connection may go on after its client has left."""


@define(eq=False)
class IdleTimer:
    """Closes a connection that is idle for ``timeout_s`` seconds, with one task per connection.

    Replaces hypercorn's ``SingleTask``, which starts one task per request. Once ``wait_for_shutdown()`` returns, idle
    connections are closed.
    """

    timeout_s: float
    wait_for_shutdown: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    first_by: float = math.inf
    """Time by which the first request must begin."""
    _scope: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    _idle: trio.Event = field(init=False, factory=trio.Event)
    _is_watching: bool = field(default=False, init=False)
    _has_ended: bool = field(default=False, init=False)

    async def restart(self, task_group: Any, action: object) -> None:  # noqa: ARG002  (hypercorn's own is not used)
        """Start the timer: the connection is idle. Cancellation: none."""
        self._idle.set()
        self._scope.deadline = min(self.first_by, trio.current_time() + self.timeout_s)
        if not self._is_watching:
            self._is_watching = True
            task_group.spawn(self._watch)

    async def stop(self) -> None:
        """Stop the timer: the connection is busy. Cancellation: none."""
        if self._idle.is_set():  # else the shutdown may wait for it already
            self._idle = trio.Event()
        self._scope.deadline = self.first_by = math.inf

    def end(self) -> None:
        """End the timer, for good: the connection ends by itself."""
        self._has_ended = True
        self._scope.cancel(reason="the connection ends by itself")

    async def _watch(self) -> None:
        while not self._has_ended:
            with self._scope:
                await self.wait_for_shutdown()
                await self._idle.wait()
            if self._idle.is_set() and not self._has_ended:
                with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await self.close()
                return
            # A request arrived just as the timeout expired.
            self._scope = trio.CancelScope()


logger = logging.getLogger(__name__)


class ContainedConnection(TCPServer):
    """hypercorn's connection, for everything but plain HTTP/1.x; it also ends when the client disconnects.

    ``received`` was read from the stream before. The first request's head must arrive by ``head_by``. Raises
    ``OSError`` if the client has left.
    """

    context: ServerContext

    def __init__(self, *args: Any, received: bytes = b"", head_by: float = math.inf) -> None:
        super().__init__(*args)
        self._wrapped_app, self.app = self.app, self  # hypercorn's protocols get it
        self._socket = getattr(self.stream, "transport_stream", self.stream).socket
        self.address = self.context.connections.address_of(self._socket.getpeername())
        self.address_budget = self.context.connections.frame_budget_of(self.address)
        self._further_requests = 0
        self._received = received
        self._reading = trio.CancelScope()
        self._connection = trio.CancelScope()
        self._client_timeout_s = self.context.connections.client_timeout_s
        self.idle_timer = IdleTimer(
            self.config.keep_alive_timeout, self._wait_for_shutdown, self._initiate_server_close, head_by
        )
        self.idle_task = self.idle_timer  # type: ignore[assignment]  # has the same methods

    async def run(self) -> None:
        """Serve the connection until it is closed. Cancellation: at once, except for hypercorn's writes."""
        try:
            with self._connection:
                await super().run()
        finally:
            self.count_requests(0)

    async def expect_first_request(self) -> None:
        """Close the connection unless a request begins within ``client_timeout_s``. Cancellation: none."""
        timer, soon = self.idle_timer, trio.current_time() + self._client_timeout_s
        timer.first_by = min(timer.first_by, soon)
        await timer.restart(self._task_group, None)

    def count_requests(self, number: int) -> None:
        """Set the number of HTTP/2 requests in progress: each but the first counts as a connection."""
        further = max(0, number - 1)
        self.context.connections.add(self.address, further - self._further_requests)
        self._further_requests = further

    async def _wait_for_shutdown(self) -> None:
        if self.context.terminated.is_set():  # accepted during the shutdown, for one request
            await trio.sleep(LAST_REQUEST_S)
        await self.context.terminated.wait()

    async def _initiate_server_close(self) -> None:
        """Close an idle connection; a client of HTTP/2 gets GOAWAY before. Cancellation: at once."""
        does_read = not self.client_has_left and has_arrived(self._socket, select.POLLOUT)
        if does_read and isinstance(protocol := self.protocol.protocol, Http2Protocol):
            await protocol.go_away(ErrorCodes.NO_ERROR)
        await super()._initiate_server_close()

    async def protocol_send(self, event: Event) -> None:
        """Handle a protocol event. Cancellation: as in hypercorn; writing ends after its time limit."""
        if isinstance(event, RawData):
            await self._write(event.data)
            return
        await super().protocol_send(event)
        if isinstance(event, Closed):
            self._reading.cancel(reason="the server has closed the connection")

    async def _write(self, data: bytes) -> None:
        """Write within ``client_timeout_s``; hypercorn has no time limit."""
        async with self.send_lock:
            try:
                with trio.fail_after(self._client_timeout_s, shield=True):
                    await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError, trio.TooSlowError):
                self._connection.cancel(reason="the client does not read")
                await self.protocol.handle(Closed())

    async def __call__(self, scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        """Call the app with a ``send`` that resets a stream whose client does not read. Cancellation: as the app."""
        if len(scope["headers"]) > MAX_HEADERS:
            await send({"type": "http.response.start", "status": 431, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return

        async def send_in_pieces(message: Any) -> None:
            body, begin = message.get("body", b""), 0
            try:
                while len(body) - begin > WRITE_PIECE:
                    piece = {**message, "body": body[begin : begin + WRITE_PIECE], "more_body": True}
                    with trio.fail_after(self._client_timeout_s):
                        await send(piece)
                    begin += WRITE_PIECE
                with trio.fail_after(self._client_timeout_s):
                    await send({**message, "body": body[begin:]} if begin else message)
            except trio.TooSlowError:
                await self._reset(scope)

        with unwrap_exception_groups(trio.Cancelled):  # hypercorn's task would keep a group, and all of its frames
            await self._wrapped_app(
                scope, receive, send_in_pieces if scope["type"] == "http" else send, sync_spawn, call_soon
            )

    async def _reset(self, scope: Any) -> None:
        """Reset an HTTP/2 stream; anything that the app sends afterwards is dropped."""
        protocol: Any = self.protocol.protocol
        for number, stream in getattr(protocol, "streams", {}).items():
            if stream.scope is scope:
                with contextlib.suppress(ProtocolError):  # the client has reset it
                    protocol.connection.reset_stream(number, ErrorCodes.CANCEL)
                # As when the client resets it; hypercorn has no other way.
                await protocol._handle_events([StreamReset(stream_id=number)])  # noqa: SLF001
                return

    @property
    def client_has_left(self) -> bool:
        """Return whether the client has closed its sending half, or the connection is closed: requests are in vain."""
        return self._socket.fileno() < 0 or has_arrived(self._socket, select.POLLRDHUP)

    def stop_reading(self) -> None:
        """Read no more at the next checkpoint of the task that reads, and end the requests."""
        self._reading.cancel(reason="the client has left")

    async def _read_data(self) -> None:
        with self._reading:
            if self._received:
                await self.protocol.handle(RawData(self._received))
            await super()._read_data()
        self.idle_timer.end()
        for unsent in [*getattr(self.protocol.protocol, "stream_buffers", {}).values()]:
            await unsent.close()  # hypercorn's streams would wait for the client to read them
        # Requests have been cancelled by now. Some connections do not end all the same: upgrades to HTTP/2, for one.
        self._connection.deadline = trio.current_time() + CLOSE_TIMEOUT_S
        await self.protocol.handle(Closed())


class Http1Protocol(H11Protocol):
    """hypercorn's protocol without ``Upgrade: h2c``: RFC 9113 withdrew it, and proxies do not see its requests."""

    async def _check_protocol(self, event: h11.Request) -> None:
        if (event.method, event.target, event.http_version) == (b"PRI", b"*", b"2.0"):
            raise H2ProtocolAssumedError(HTTP2_PREFACE + self.connection.trailing_data[0])


def _http2_protocol(app: Any, *arguments: Any) -> H2Protocol:
    return (Http2Protocol if isinstance(app, ContainedConnection) else H2Protocol)(app, *arguments)


# hypercorn's wrapper of protocols has no other extension point; the version is pinned.
setattr(hypercorn.protocol, H11Protocol.__name__, Http1Protocol)
setattr(hypercorn.protocol, H2Protocol.__name__, _http2_protocol)


async def serve_connection(
    app: AppWrapper,
    config: Config,
    context: ServerContext,
    state: Any,
    stream: Any,
    received: bytes = b"",
    head_by: float = math.inf,
) -> None:
    """Serve a connection until it is closed; its exceptions are logged, and end nothing else.

    ``received`` was read from it before, without TLS. Cancellation: at once, except for hypercorn's writes.
    """
    try:
        async with closing(stream):
            if _is_plain(config, stream):
                connection = HttpConnection(app, config, context, state, stream, received)
                if (left_over := await connection.run()) is None:
                    if not connection.has_ended:
                        await end_sending(stream.socket)
                    return
                received, head_by = left_over, trio.current_time() + context.connections.client_timeout_s
            await ContainedConnection(app, config, context, state, stream, received=received, head_by=head_by).run()
    except OSError:
        return  # the client left before its address was read
    except Exception as error:
        # Not a cancellation: a group with ``trio.Cancelled`` is a ``BaseExceptionGroup``, not an ``Exception``.
        logger.warning("a connection failed: %s", type(error).__name__)
        logger.debug("traceback of the failed connection", exc_info=error)


@contextlib.asynccontextmanager
async def closing(stream: Any) -> AsyncIterator[None]:
    """Close a stream at the end of the block; a TCP connection without a turn of the loop for that."""
    try:
        yield
    finally:
        if isinstance(stream, trio.SocketStream):
            stream.socket.close()
        else:
            await trio.aclose_forcefully(stream)


async def serve_counted(app: AppWrapper, config: Config, context: ServerContext, state: Any, stream: Any) -> None:
    """Serve a connection of hypercorn's listener if there is room. Cancellation: as ``serve_connection``."""
    try:
        address = context.connections.address_of(getattr(stream, "transport_stream", stream).socket.getpeername())
    except OSError:
        return  # the client has left
    if context.connections.refuses(address):
        return
    served = getattr(app, "app", None)
    if isinstance(served, PoolServeApp):
        context.refusals = RefusalWriter(served.overload, config)
    context.connections.add(address)
    try:
        await serve_connection(app, config, context, state, stream)
    finally:
        context.connections.add(address, -1)


def _is_plain(config: Config, stream: Any) -> bool:
    """Return whether ``HttpConnection`` can read it: no TLS, and no setting that only hypercorn supports."""
    return isinstance(stream, trio.SocketStream) and not (
        config.read_timeout or config.server_names or config.h11_pass_raw_headers
    )


def contain_connections(connections: Connections | None = None) -> None:
    """Make hypercorn's trio workers in this process serve each connection with ``serve_connection``.

    Replaces names in hypercorn's module, which has no other extension point; the version is pinned.
    """
    setattr(hypercorn.trio.run, TCPServer.__name__, serve_counted)
    setattr(hypercorn.trio.run, WorkerContext.__name__, partial(ServerContext, connections=connections))

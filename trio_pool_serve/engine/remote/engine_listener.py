"""Serves an engine over TCP to API processes that have its key."""

import logging
import math
from collections import Counter
from functools import partial

import trio
from attrs import define, field

from trio_pool_serve.engine.remote.device_server import ApiConnection, DeviceServer
from trio_pool_serve.engine.remote.link import LinkKeys, LinkRefusedError, answer_greeting
from trio_pool_serve.engine.remote.wire import ToEngine
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

MAX_GREETING = 256
"""Maximum connections that have not finished their greeting. Beyond it, the oldest one of the address with the most is
closed."""

LOG_INTERVAL_S = 1.0
"""Refusals are logged at most once per interval: a port scanner may connect a thousand times."""


@define(eq=False)
class EngineListener:
    """The connections of an engine; a connection that is refused, silent or broken ends alone."""

    server: DeviceServer
    keys: LinkKeys
    refused: int = field(default=0, init=False)
    """Connections that were refused."""
    _greeting: dict[trio.CancelScope, str] = field(init=False, factory=dict)
    """The host at the other end of each greeting, in order of arrival."""
    _is_leaving: bool = field(default=False, init=False)
    _logged_at: float = field(default=-math.inf, init=False)
    _logged: int = field(default=0, init=False)

    async def serve_until(
        self, leaving: trio.Event, listeners: list[trio.SocketListener], drain_timeout_s: float = math.inf
    ) -> None:
        """Serve API processes until ``leaving`` is set, then until they have their answers or the timeout is over.

        Cancellation: at once; the connections are closed.
        """
        with trio.CancelScope() as limit:
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as listening:
                    serve = partial(trio.serve_listeners, self.serve, listeners, handler_nursery=connections)
                    listening.start_soon(serve)
                    await leaving.wait()
                    listening.cancel_scope.cancel(reason="the process is to end")
                self._is_leaving = True
                for connection in self.server.connections:
                    connection.leave()
                limit.deadline = trio.current_time() + drain_timeout_s
        if limit.cancelled_caught:
            logger.warning("exiting with %d rows unfinished", self.server.worker.statistics().queued_rows)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends. Cancellation: at once; its rows leave the queue."""
        peer = _peer_of(stream)
        async with stream:
            try:
                greeted = await self._greet(stream, peer.partition(" port")[0])
            except LinkRefusedError as error:
                self._log_refused(peer, error)
                return
            except trio.BrokenResourceError:
                return  # a probe of the port, or too many
            connection = ApiConnection(self.server, *greeted)
            logger.info("an API process at %s is connected", peer)
            if self._is_leaving:
                connection.leave()
            try:
                await connection.serve()
            finally:
                logger.info("an API process at %s is disconnected", peer)

    async def _greet(self, stream: trio.SocketStream, host: str) -> tuple[FramedStream[ToEngine], float]:
        """Return and raise as ``answer_greeting``. If too many greetings are unfinished, the oldest connection ends."""
        with trio.CancelScope() as scope:
            self._greeting[scope] = host
            if len(self._greeting) > MAX_GREETING:
                ((most, _),) = Counter(self._greeting.values()).most_common(1)
                oldest = next(each for each, address in self._greeting.items() if address == most)
                oldest.cancel(reason="too many connections have not ended their greeting")
            try:
                return await answer_greeting(stream, self.keys.keys)
            finally:
                del self._greeting[scope]
        raise trio.BrokenResourceError("too many connections have not ended their greeting")

    def _log_refused(self, peer: str, error: LinkRefusedError) -> None:
        self.refused += 1
        now = trio.current_time()
        if now - self._logged_at >= LOG_INTERVAL_S:
            since = self.refused - self._logged
            logger.warning("a connection from %s is refused: %s (%d since the last such line)", peer, error, since)
            self._logged_at, self._logged = now, self.refused


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # it has disconnected
        return "an unknown address"
    return f"{host} port {port}"

"""Serves an engine to API processes that connect by TCP and have its key."""

import logging
import math
from collections import Counter
from collections.abc import Callable

import trio
from attrs import define, field

from trio_pool_serve.engine.remote.api_connection import ApiConnection
from trio_pool_serve.engine.remote.device_server import DeviceServer
from trio_pool_serve.engine.remote.greeting import answer_greeting
from trio_pool_serve.engine.remote.keys import LinkKeys, LinkRefusedError
from trio_pool_serve.engine.remote.wire import Hello, ToEngine
from trio_pool_serve.processes.framed_stream import FramedStream

logger = logging.getLogger(__name__)

MAX_GREETING = 256
"""Connections whose greeting has not ended. For one more, the oldest of the address with the most is closed."""

LOG_INTERVAL_S = 1.0
"""Refusals are logged at most so often: a port scanner may come a thousand times."""


@define(eq=False)
class EngineListener:
    """The connections of an engine; one that is refused, silent or broken ends alone."""

    server: DeviceServer
    keys: LinkKeys
    hello: Callable[[], Hello]
    refused: int = field(default=0, init=False)
    """Connections that were refused."""
    _greeting: dict[trio.CancelScope, str] = field(init=False, factory=dict)
    """Addresses, in order of arrival."""
    _connections: set[ApiConnection] = field(init=False, factory=set)
    _is_leaving: bool = field(default=False, init=False)
    _disconnected: trio.Event = field(init=False, factory=trio.Event)
    """Set when a connection or a greeting has ended."""
    _logged_at: float = field(default=-math.inf, init=False)
    _logged: int = field(default=0, init=False)

    @property
    def connections(self) -> int:
        """API processes that are connected."""
        return len(self._connections)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends. Cancellation: at once; its rows leave the queue."""
        async with stream:
            try:
                greeted = await self._greet(stream)
            except LinkRefusedError as error:
                self._log_refused(_peer_of(stream), error)
                return
            except trio.BrokenResourceError:
                return  # a probe of the port
            if greeted is None:
                return
            connection = ApiConnection(self.server, greeted[0], self.hello, greeted[1])
            self._connections.add(connection)
            peer = _peer_of(stream)
            logger.info("an API process at %s is connected", peer)
            if self._is_leaving:
                connection.leave()
            try:
                await connection.serve()
            finally:
                self._connections.discard(connection)
                self._disconnected.set()
                logger.info("an API process at %s is disconnected", peer)

    async def _greet(self, stream: trio.SocketStream) -> tuple[FramedStream[ToEngine], float] | None:
        """Return what ``answer_greeting`` does; ``None`` if there are too many connections in their greeting."""
        with trio.CancelScope() as scope:
            self._greeting[scope] = _peer_of(stream).partition(" port")[0]
            if len(self._greeting) > MAX_GREETING:
                ((most, _),) = Counter(self._greeting.values()).most_common(1)
                oldest = next(each for each, address in self._greeting.items() if address == most)
                oldest.cancel(reason="too many connections have not ended their greeting")
            try:
                return await answer_greeting(stream, self.keys.keys)
            finally:
                del self._greeting[scope]
                self._disconnected.set()
        return None

    async def leave(self) -> None:
        """Tell all API processes to send no more rows, and wait until they have their answers and disconnect.

        Cancellation: at once.
        """
        self._is_leaving = True
        for connection in self._connections:
            connection.leave()
        while self._connections or self._greeting:
            self._disconnected = trio.Event()
            await self._disconnected.wait()

    def _log_refused(self, peer: str, error: LinkRefusedError) -> None:
        self.refused += 1
        now = trio.current_time()
        if now - self._logged_at >= LOG_INTERVAL_S:
            logger.warning(
                "a connection from %s is refused: %s (%d since the last such line)",
                peer,
                error,
                self.refused - self._logged,
            )
            self._logged_at, self._logged = now, self.refused


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # it has disconnected
        return "an unknown address"
    return f"{host} port {port}"

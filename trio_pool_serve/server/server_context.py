"""What all connections of a process share: limits, the number of open connections, and the shutdown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field, frozen
from hypercorn.config import Config
from hypercorn.trio.worker_context import EventWrapper, WorkerContext

from trio_pool_serve.server.outgoing_response import ServerHeaders

WRITE_PIECE = 256 * 1024
"""Responses are written in pieces of so many bytes, each of which has a time limit."""


@frozen(kw_only=True)
class ConnectionLimits:
    """How many connections are served at once, and how long their clients may take.

    In ``client_timeout_s`` a client must send a request's head, or read ``WRITE_PIECE`` bytes of a response.
    """

    client_timeout_s: float = 60.0
    max_connections: int = 4096
    """More than there are clients that wait for a response: ``--max-queue-s`` refuses the requests of others."""
    max_refused: int = 256
    """That are kept open until their clients have had time to read why; older ones are closed."""


@define(eq=False)
class Connections:
    """The connections of a process: how many are open, and how many have been refused."""

    limits: ConnectionLimits = ConnectionLimits()
    on_refusal: Callable[[], object] = lambda: None
    open: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)

    def refuses(self) -> bool:
        """Return whether there is no room for one more connection, and count it as refused then."""
        is_refused = self.open >= self.limits.max_connections
        if is_refused:
            self.note_refusal()
        return is_refused

    def note_refusal(self) -> None:
        """Count a connection that is refused."""
        self.refused += 1
        self.on_refusal()


class Termination(EventWrapper):
    """hypercorn's event that the server shuts down; it also wakes the connections that wait for a request.

    So those need no task for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[trio.CancelScope, float] = {}

    async def set(self) -> None:
        """Set the event, and end what waits in ``waiting``. Cancellation: none."""
        await super().set()
        for scope, grace_s in self._waiting.items():
            scope.deadline = min(scope.deadline, trio.current_time() + grace_s)

    @contextmanager
    def waiting(self, until: float, grace_s: float = 0.0) -> Iterator[trio.CancelScope]:
        """Cancel the block at the time ``until``, and ``grace_s`` seconds after the server begins to shut down."""
        with trio.CancelScope(deadline=until) as scope:
            self._waiting[scope] = grace_s
            try:
                yield scope
            finally:
                del self._waiting[scope]


class ServerContext(WorkerContext):
    """hypercorn's context of a worker, with what connections of ours need in addition."""

    terminated: Termination

    def __init__(self, max_requests: int | None = None, connections: Connections | None = None) -> None:
        super().__init__(max_requests)
        self.terminated = Termination()
        self.connections = connections or Connections()
        self._server_headers: ServerHeaders | None = None

    def server_headers(self, config: Config) -> ServerHeaders:
        """Return the headers that the server adds to all responses; they are the same for all connections."""
        if self._server_headers is None:
            self._server_headers = ServerHeaders(config)
        return self._server_headers

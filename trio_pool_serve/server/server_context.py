"""State shared by all connections of a process: limits, the number of open connections, and the shutdown."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import trio
from attrs import define, field
from hypercorn.trio.worker_context import EventWrapper, WorkerContext

from trio_pool_serve.service import Service

WRITE_PIECE = 256 * 1024
"""Responses are written in pieces of this many bytes, each with a time limit."""

RESERVED_FILES = 256
"""File descriptors kept for models, child processes, uploads and fetched images, not for connections, refused ones
included. At most half of all."""


MAX_CONNECTIONS = 4096
"""More than can wait for a response: ``--max-queue-s`` refuses further requests."""

MAX_REFUSED = 256
"""Refused connections that stay open until their clients have had time to read why; the oldest are closed first."""


@define(eq=False, kw_only=True)
class Connections:
    """The number of open connections of a process, and the limits of these and of refused ones.

    ``on_refusal`` is called for each refused connection. Within ``client_timeout_s`` a client must send a request's
    head, or read ``WRITE_PIECE`` bytes of a response.
    """

    client_timeout_s: float = 60.0
    max_connections: int = MAX_CONNECTIONS
    max_refused: int = MAX_REFUSED
    on_refusal: Callable[[], object] = lambda: None
    open: int = field(default=0, init=False)

    @classmethod
    def of(cls, service: Service) -> Self:
        """Return the connections of a service's process, with limits that fit its files, and show them as gauges."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = files - min(RESERVED_FILES, files // 2)
        max_refused = min(MAX_REFUSED, room // 8)
        limit = max(1, min(MAX_CONNECTIONS, room - max_refused))
        connections = cls(
            client_timeout_s=service.config.time_limits.client_timeout_s,
            max_connections=limit,
            max_refused=max_refused,
            on_refusal=service.metrics.connections_refused.inc,
        )
        service.metrics.add_gauges(lambda: {"connections": {"open": connections.open, "limit": limit}})
        return connections

    def refuses(self) -> bool:
        """Return whether there is no room for another connection, which then counts as refused."""
        is_refused = self.open >= self.max_connections
        if is_refused:
            self.on_refusal()
        return is_refused


class Termination(EventWrapper):
    """hypercorn's event for the server's shutdown; it also wakes connections that wait for a request.

    So they need no task to wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[trio.CancelScope, float] = {}

    async def set(self) -> None:
        """Set the event, and end the blocks of ``waiting``. Cancellation: none."""
        await super().set()
        for scope, grace_s in self._waiting.items():
            scope.deadline = min(scope.deadline, trio.current_time() + grace_s)

    @contextmanager
    def waiting(self, until: float, grace_s: float = 0.0) -> Iterator[trio.CancelScope]:
        """Cancel the block at ``until``, or ``grace_s`` seconds after the server begins to shut down."""
        with trio.CancelScope(deadline=until) as scope:
            self._waiting[scope] = grace_s
            try:
                yield scope
            finally:
                del self._waiting[scope]


class ServerContext(WorkerContext):
    """hypercorn's worker context, with the state that our own connections need."""

    terminated: Termination

    def __init__(self, max_requests: int | None = None, connections: Connections | None = None) -> None:
        super().__init__(max_requests)
        self.terminated = Termination()
        self.connections = connections or Connections()

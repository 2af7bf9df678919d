"""State shared by all connections of a process: limits, the number of open connections, and the shutdown."""

import math
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import trio
from attrs import define, field
from hypercorn.trio.worker_context import EventWrapper, WorkerContext

from trio_pool_serve.access.client_labels import ClientLabels, label_of_address
from trio_pool_serve.server.frame_budget import BURST, PER_S, FrameBudget
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.service import Service

WRITE_PIECE = 256 * 1024
"""Bytes of a piece of a response; each piece has a time limit."""

RESERVED_FILES = 256
"""File descriptors kept for models, child processes, uploads and fetched images, not for connections, refused ones
included. At most half of all."""


MAX_CONNECTIONS = 4096
"""Maximum open connections, more than can wait for a response: ``--max-queue-s`` refuses further requests."""

MAX_REFUSED = 256
"""Refused connections that stay open until their clients have had time to read why; the oldest are closed first."""


ADDRESS_CONNECTIONS = 4
"""Number of connections whose budgets of HTTP/2 frames an address may waste."""

MAX_BUDGETS = 4096
"""Maximum number of addresses whose budgets are remembered."""


@define(eq=False, kw_only=True)
class Connections:
    """The number of open connections of a process, and the limits of these and of refused ones.

    Each further HTTP/2 request of a connection counts as one. An address may have half of them, and waste a limited
    number of HTTP/2 frames. Trusted proxies (``labels``) and clients of a Unix socket, all of which count as the
    address ``""``, are not limited. ``on_refusal`` is called for each that is refused. Within ``client_timeout_s`` a
    client must send a request's head, or read ``WRITE_PIECE`` bytes of a response.
    """

    client_timeout_s: float = 60.0
    max_connections: int = MAX_CONNECTIONS
    max_refused: int = MAX_REFUSED
    on_refusal: Callable[[], object] = lambda: None
    labels: ClientLabels = field(factory=ClientLabels)
    open: int = field(default=0, init=False)
    _of_address: Counter[str] = field(init=False, factory=Counter)
    _frame_budgets: dict[str, FrameBudget] = field(init=False, factory=dict)

    @classmethod
    def of(cls, service: Service) -> Self:
        """Return the connections of a service's process, with limits that fit its files, and show them as gauges."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = files - min(RESERVED_FILES, files // 2)
        max_refused = min(MAX_REFUSED, room // 8)
        limit = max(1, min(MAX_CONNECTIONS, room - max_refused))
        network = service.config.network
        connections = cls(
            client_timeout_s=service.config.time_limits.client_timeout_s,
            max_connections=limit,
            max_refused=max_refused,
            on_refusal=service.metrics.connections_refused.inc,
            labels=ClientLabels(network.proxy_networks),
        )
        service.metrics.add_gauges(lambda: {"connections": {"open": connections.open, "limit": limit}})
        return connections

    def address_of(self, peer: Any) -> str:
        """Return the address by which a peer is limited, of a whole /64 network of IPv6; empty if it is not limited."""
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        return "" if self.labels.is_proxy(address) else label_of_address(address)

    def refuses(self, address: str) -> bool:
        """Return whether there is no room for another connection or request of an address; it is refused then."""
        most_of_address = math.ceil(self.max_connections / 2) if address else self.max_connections
        is_refused = self.open >= self.max_connections or self._of_address[address] >= most_of_address
        if is_refused:
            self.on_refusal()
        return is_refused

    def add(self, address: str, number: int = 1) -> None:
        """Count connections that have begun or, with a negative number, ended."""
        self.open += number
        self._of_address[address] += number
        if not self._of_address[address]:
            del self._of_address[address]

    def frame_budget_of(self, address: str) -> FrameBudget:
        """Return the budget that the connections of an address share."""
        if not address:
            return FrameBudget(math.inf)
        if len(self._frame_budgets) >= MAX_BUDGETS:
            self._frame_budgets.clear()
        budget = FrameBudget(ADDRESS_CONNECTIONS * BURST, ADDRESS_CONNECTIONS * PER_S)
        return self._frame_budgets.setdefault(address, budget)


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
    """hypercorn's worker context, with the state that our own connections need; ``refusals`` answer requests first."""

    terminated: Termination

    def __init__(
        self,
        max_requests: int | None = None,
        connections: Connections | None = None,
        refusals: RefusalWriter | None = None,
    ) -> None:
        super().__init__(max_requests)
        self.terminated = Termination()
        self.connections = connections or Connections()
        self.refusals = refusals

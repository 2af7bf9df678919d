"""From the names of hosts to their addresses."""

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio
from attrs import define, field, frozen

MAX_CONCURRENT_LOOK_UPS = 16
"""Threads that wait for name servers, those included that nobody waits for any more."""

LookUp = Callable[..., Sequence[tuple[Any, ...]]]
"""As ``socket.getaddrinfo``."""


@frozen
class ResolverStatistics:
    """Which threads look names up."""

    capacity: int
    borrowed: int
    waiting: int


@define(eq=False)
class Resolver:
    """Looks up the addresses of hosts in threads, under a limiter of its own.

    A thread that asks a name server cannot be told to stop, and whoever owns a domain says how long it takes. So it
    keeps its token until it is done, even if nobody waits for it any more: nobody else's threads are taken.
    """

    look_up: LookUp = socket.getaddrinfo
    _limiter: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(MAX_CONCURRENT_LOOK_UPS))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, each once, in the order in which they are to be tried; none if it has none.

        What is an address itself, however it is written, needs no thread.

        Cancellation: at once; the thread that asks the name server ends by itself.
        """
        await trio.lowlevel.checkpoint()
        try:
            found = self._read(host, port) or await self._ask(host, port)
        except (OSError, UnicodeError):
            return []
        # One that is of an interface, as in fe80::1%eth0, cannot be in a URL.
        return list(dict.fromkeys(address for address in (str(where[0]) for *_, where in found) if "%" not in address))

    def statistics(self) -> ResolverStatistics:
        """Return what is being looked up now."""
        stats = self._limiter.statistics()
        return ResolverStatistics(int(stats.total_tokens), stats.borrowed_tokens, stats.tasks_waiting)

    def _read(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return ()

    async def _ask(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        look_up = partial(self.look_up, host, port, type=socket.SOCK_STREAM)
        return await trio.to_thread.run_sync(look_up, limiter=self._limiter, abandon_on_cancel=True)

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<Resolver {stats.borrowed}/{stats.capacity}+{stats.waiting}>"

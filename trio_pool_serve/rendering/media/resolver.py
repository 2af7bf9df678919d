"""Resolves host names in threads."""

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import trio
from attrs import define, field, frozen

from trio_pool_serve.errors import StartFailedError
from trio_pool_serve.threads.client_turns import ClientTurns, TurnLimiter

MAX_CONCURRENT_LOOK_UPS = 16
"""Threads that wait for name servers, including those of cancelled look-ups; of one client at most half."""

LookUp = Callable[..., Sequence[tuple[Any, ...]]]
"""A function with the signature of ``socket.getaddrinfo``."""


@frozen
class ResolverStatistics:
    """Use of the look-up limiter."""

    capacity: int
    borrowed: int
    waiting: int


@define(eq=False)
class Resolver:
    """Looks up the addresses of hosts in threads, under a separate limiter.

    A thread in a look-up cannot be stopped, and a domain's owner controls how long the look-up takes. So a thread keeps
    its token until it finishes, even after cancellation, and slow look-ups never take threads from other work.
    """

    look_up: LookUp = socket.getaddrinfo
    _turns: ClientTurns = field(
        init=False, factory=lambda: ClientTurns(MAX_CONCURRENT_LOOK_UPS, MAX_CONCURRENT_LOOK_UPS // 2)
    )

    async def resolve(self, host: str, port: int, client: int = 0) -> list[str]:
        """Return the distinct addresses of a host in the order to try them; empty if it cannot be resolved.

        An address in any notation is converted without a thread.

        Cancellation: at once; the look-up's thread keeps its token until it finishes.
        """
        await trio.lowlevel.checkpoint()
        try:
            found = self._parse_address(host, port) or await self._look_up(host, port, client)
        except (OSError, UnicodeError):
            return []
        # Addresses with an interface, such as fe80::1%eth0, cannot be in a URL.
        return list(dict.fromkeys(address for address in (str(where[0]) for *_, where in found) if "%" not in address))

    def statistics(self) -> ResolverStatistics:
        """Return the current use of the look-up limiter."""
        return ResolverStatistics(self._turns.slots, self._turns.working, self._turns.waiting)

    def _parse_address(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return ()

    async def _look_up(self, host: str, port: int, client: int) -> Sequence[tuple[Any, ...]]:
        look_up = partial(self.look_up, host, port, type=socket.SOCK_STREAM)
        limiter = cast("trio.CapacityLimiter", TurnLimiter(self._turns, client))  # trio takes any with its methods
        try:
            return await trio.to_thread.run_sync(look_up, limiter=limiter, abandon_on_cancel=True)
        except RuntimeError as error:
            raise StartFailedError("The server cannot start another thread now.") from error

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<Resolver {stats.borrowed}/{stats.capacity}+{stats.waiting}>"

"""Classifies network addresses, for restricting where images are fetched from."""

import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, cast

import trio
from attrs import define, field

from trio_pool_serve.errors import StartFailedError
from trio_pool_serve.threads.client_turns import ClientTurns, TurnLimiter

GLOBAL_UNICAST = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
"""The last 32 bits are an IPv4 address: RFC 6052, section 2.1."""

NOT_GLOBAL = (
    IPv4Network("168.63.129.16/32"),  # the host of an Azure virtual machine, reachable only from it
    IPv4Network("192.0.0.0/24"),  # special purposes, RFC 6890; Oracle's cloud served metadata at 192.0.0.192
    IPv4Network("192.88.99.0/24"),  # the nearest 6to4 relay, RFC 7526
    IPv6Network("3fff::/20"),  # documentation, RFC 9637
)
"""Addresses that at least one supported version of Python classifies as global."""

DOCUMENTATION = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses assigned to no machine: RFC 5737 and RFC 3849."""


def is_public(address: str) -> bool:
    """Whether an address, and the IPv4 address embedded in it, belong to the public internet and not to this machine.

    Routers forward packets for some IPv6 addresses to an IPv4 address embedded in them: mapped, NAT64 or 6to4.

    This machine's addresses are its interfaces'. An address that a router translates to it cannot be detected.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        if ip.scope_id is not None:
            return False
        if ip in NAT64:
            return is_public(str(IPv4Address(int(ip) & 0xFFFF_FFFF)))
        # Mapped addresses are not accepted: clients can send the IPv4 address.
        if ip not in GLOBAL_UNICAST or (ip.sixtofour is not None and not is_public(str(ip.sixtofour))):
            return False
    # Not global: private, loopback, link-local, carrier-grade NAT, documentation, 0/8 and 240/4.
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    return not any(ip in network for network in NOT_GLOBAL) and not is_own(str(ip))


def is_own(address: str) -> bool:
    """Whether an IP address is one of this machine's interfaces. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if _can_be_bound(family, address) and not _can_be_bound(family, DOCUMENTATION[family]):
        return True
    # Some systems allow binding any address. There, packets to this machine have it as source address.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, 9))
            return bool(route.getsockname()[0] == address)
    except OSError:
        return False  # no route


def is_within(address: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Whether an address is in one of the networks. A host name, or an address in another notation, is not."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return any(ip in network for network in networks)


def _can_be_bound(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((address, 0))
    except OSError:
        return False
    return True


MAX_CONCURRENT_LOOK_UPS = 16
"""Threads that wait for name servers, also for cancelled look-ups; one client has at most half of them."""


@define(eq=False)
class Resolver:
    """Looks up the addresses of hosts in threads, under a separate limiter.

    A thread in a look-up cannot be stopped, and a domain's owner controls how long the look-up takes. So a thread keeps
    its token until it finishes, even after cancellation, and slow look-ups never take threads from other work.
    """

    look_up: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo
    """A function with the signature of ``socket.getaddrinfo``."""
    turns: ClientTurns = field(
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

    def _parse_address(self, host: str, port: int) -> Sequence[tuple[Any, ...]]:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return ()

    async def _look_up(self, host: str, port: int, client: int) -> Sequence[tuple[Any, ...]]:
        limiter = cast("trio.CapacityLimiter", TurnLimiter(self.turns, client))  # trio takes any with its methods
        try:
            return await trio.to_thread.run_sync(
                partial(self.look_up, host, port, type=socket.SOCK_STREAM), limiter=limiter, abandon_on_cancel=True
            )
        except RuntimeError as error:
            raise StartFailedError("The server cannot start another thread now.") from error

    def __repr__(self) -> str:
        return f"<Resolver {self.turns.statistics()}>"

"""Which network addresses images are fetched from."""

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import trio

GLOBAL_UNICAST = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address is its last 32 bits: RFC 6052, section 2.1."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once, in the order in which they are to be tried; none if it has none.

    Cancellation: at once; the thread that asks the name server ends by itself.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # One that is of an interface, as in fe80::1%eth0, cannot be in a URL.
    return list(dict.fromkeys(address for address in (str(where[0]) for *_, where in found) if "%" not in address))


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, and so is every address that it stands for.

    An IPv6 address can carry an IPv4 address to which routers on the way send what is sent to it: mapped, behind
    NAT64, or in a 6to4 network.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return _is_public_v4(ip) if isinstance(ip, IPv4Address) else _is_public_v6(ip)


def is_any(address: str) -> bool:
    """Whether an address is one at all."""
    return bool(address)


def _is_public_v4(ip: IPv4Address) -> bool:
    # Not global: private, loopback, link-local, shared between carriers' customers, documentation, 0/8 and 240/4.
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _is_public_v6(ip: IPv6Address) -> bool:
    if ip.scope_id is not None:
        return False
    if ip in NAT64:
        return _is_public_v4(IPv4Address(int(ip) & 0xFFFF_FFFF))
    if ip.sixtofour is not None and not _is_public_v4(ip.sixtofour):
        return False
    # A mapped address is none of these: its IPv4 form is there for whoever means it.
    return ip in GLOBAL_UNICAST and ip.is_global and not ip.is_multicast

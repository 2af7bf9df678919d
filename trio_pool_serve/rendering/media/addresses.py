"""Which network addresses images are fetched from."""

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

GLOBAL_UNICAST = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address is its last 32 bits: RFC 6052, section 2.1."""

NOT_GLOBAL = (
    IPv4Network("168.63.129.16/32"),  # Azure's virtual machines reach their host there, and nobody else does
    IPv4Network("192.0.0.0/24"),  # special purposes, RFC 6890; Oracle's cloud answered for metadata at 192.0.0.192
    IPv4Network("192.88.99.0/24"),  # the nearest 6to4 relay, RFC 7526
    IPv6Network("3fff::/20"),  # documentation, RFC 9637
)
"""What Python, or one of the versions that are supported, takes for global."""

DOCUMENTATION = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no machine has: RFC 5737 and RFC 3849."""


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet and not of this machine, and so is what it stands for.

    An IPv6 address can carry an IPv4 address to which routers on the way send what is sent to it: mapped, behind
    NAT64, or in a 6to4 network.

    This machine's addresses are those of its interfaces. One that a router in front of it translates is not known here.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return _is_public_v4(ip) if isinstance(ip, IPv4Address) else _is_public_v6(ip)


def is_own(address: str) -> bool:
    """Whether an IP address is one of this machine's interfaces. Nothing is sent to find out."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if _can_be_bound(family, address) and not _can_be_bound(family, DOCUMENTATION[family]):
        return True
    # Some systems are set up so that any address can be bound. Then what is sent to oneself is from the same address.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, 9))
            return bool(route.getsockname()[0] == address)
    except OSError:
        return False  # there is no way to it


def is_any_address(address: str) -> bool:
    """Whether an address is one at all."""
    return bool(address)


def _is_public_v4(ip: IPv4Address) -> bool:
    # Not global: private, loopback, link-local, shared between carriers' customers, documentation, 0/8 and 240/4.
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    return not any(ip in network for network in NOT_GLOBAL) and not is_own(str(ip))


def _is_public_v6(ip: IPv6Address) -> bool:
    if ip.scope_id is not None:
        return False
    if ip in NAT64:
        return _is_public_v4(IPv4Address(int(ip) & 0xFFFF_FFFF))
    if ip.sixtofour is not None and not _is_public_v4(ip.sixtofour):
        return False
    # A mapped address is none of these: its IPv4 form is there for whoever means it.
    if ip not in GLOBAL_UNICAST or not ip.is_global or ip.is_multicast:
        return False
    return not any(ip in network for network in NOT_GLOBAL) and not is_own(str(ip))


def _can_be_bound(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((address, 0))
    except OSError:
        return False
    return True

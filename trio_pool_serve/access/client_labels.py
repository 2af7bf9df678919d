"""Labels of clients that present no API key: from their address, or from a header of a trusted proxy."""

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from attrs import frozen

HEADER = b"x-forwarded-for"
"""Header in which proxies name their client; nginx, HAProxy and cloud load balancers send it."""

ADDRESS_AND_PORT = re.compile(r"([\d.]+):\d+|\[([^][]+)\](?::\d+)?")
"""Some load balancers add the client's port, which is another one for each connection."""

MAX_LABEL = 128
"""Characters of a proxy's header that are kept."""


@frozen
class ClientLabels:
    """Labels clients by their address, or by the header in requests from trusted proxies.

    Trusted proxies are the addresses in ``networks`` and, with ``trusts_unix``, the clients of a Unix socket.
    """

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    trusts_unix: bool = False

    def is_proxy(self, address: str) -> bool:
        """Return whether an address is a trusted proxy's; it is empty for clients of a Unix socket."""
        if not address:
            return self.trusts_unix
        ip = _ip_of(address) if self.networks else None
        return ip is not None and any(ip in network for network in self.networks)

    def label(self, address: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the label of the client with this address, empty for a Unix socket, and these headers."""
        if self.is_proxy(address):
            given = b",".join(value for name, value in headers if name == HEADER).decode("latin1")
            # Each proxy appends the address of its client; entries made up by a client come before.
            for part in reversed(given.split(",")):
                if (name := _without_port(part)) and not self.is_proxy(name):
                    return _label_of_name(name[:MAX_LABEL])
        return label_of_address(address)


def _ip_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a text is, as IPv4 if it is mapped to IPv6; ``None`` if it is none."""
    try:
        ip = ip_address(text)
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def _without_port(entry: str) -> str:
    """Return an entry of the header without quotes, and an address in it without brackets and port."""
    name = entry.strip().strip('"')
    found = ADDRESS_AND_PORT.fullmatch(name)
    return name if found is None else found[1] or found[2]


@lru_cache(1024)
def label_of_address(address: str) -> str:
    """Return an IPv4 address unchanged, and the /64 network of an IPv6 address: one client has all of it."""
    ip = _ip_of(address)
    if isinstance(ip, IPv6Address):
        return str(IPv6Network((int(ip) >> 64 << 64, 64)))
    return address if ip is None else str(ip)  # empty: a Unix socket


def _label_of_name(name: str) -> str:
    if _ip_of(name) is not None:
        return label_of_address(name)
    return "id:" + "".join(each if each.isascii() and each.isprintable() else "?" for each in name)

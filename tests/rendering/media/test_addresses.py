"""Which addresses are public."""

import shutil
import socket
import subprocess
import sys

import pytest

from trio_pool_serve.rendering.media.addresses import is_own, is_public

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::8.8.8.8"]

NOT_PUBLIC = {
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12:3456::1", "fec0::1"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "link-local": ["169.254.0.1", "169.254.169.254", "fe80::1", "fe80::1%lo"],
    "of a cloud's own services": ["168.63.129.16", "100.100.100.200", "169.254.0.23", "192.0.0.192", "fd00:ec2::254"],
    "for special purposes": ["192.0.0.8", "192.88.99.1", "3fff::1"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "reserved": ["240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "2001:db8::1", "4000::1"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "shared by a carrier's customers": ["100.64.0.1", "100.127.255.255"],
    "mapped to IPv6": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1"],
    "behind NAT64": [
        "64:ff9b::127.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b::169.254.169.254",
        "64:ff9b::168.63.129.16",
        "64:ff9b:1::1",
    ],
    "in a 6to4 network": ["2002:7f00:1::1", "2002:a00:1::", "2002:a9fe:a9fe::", "2002:a83f:8110::"],
    "in Teredo": ["2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "no address": ["", "localhost", "127.1", "0x7f000001"],
}


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize("addresses", NOT_PUBLIC.values(), ids=NOT_PUBLIC)
def test_no_other_address_is(addresses):
    assert [address for address in addresses if is_public(address)] == []


def test_addresses_of_this_machine_are_told_from_others():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))
            own = route.getsockname()[0]
        except OSError:
            own = "127.0.0.1"  # there is no way out of here
    assert [address for address in ("127.0.0.1", "127.9.9.9", own) if not is_own(address)] == []
    assert [
        address for address in ("8.8.8.8", "192.0.2.1", "2001:db8::1", "2606:4700:4700::1111") if is_own(address)
    ] == []


ELSEWHERE = ["unshare", "--net", "--map-root-user"]
"""A program with network interfaces of its own."""

INTERFACES = """
ip link set lo up
ip address add 8.8.8.8/24 dev lo
ip address add 8.8.8.9/24 dev lo
ip -6 address add 2606:4700::1/64 dev lo nodad 2>/dev/null
ip route add default dev lo
{then}
exec "$0" -c '
from trio_pool_serve.rendering.media.addresses import is_public
print([address for address in "8.8.8.8 8.8.8.9 64:ff9b::8.8.8.9 1.1.1.1 8.8.4.4".split() if is_public(address)])
'
"""


@pytest.mark.parametrize("then", ["", "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind || exit 77"])
def test_public_addresses_of_this_machine_are_not_public(then):
    """A second one of a network is told apart too, unless any address can be bound: then only the first."""
    if not (shutil.which("unshare") and shutil.which("ip")) or subprocess.run([*ELSEWHERE, "true"]).returncode:
        pytest.skip("no network interfaces of one's own here")
    run = subprocess.run(
        [*ELSEWHERE, "sh", "-c", INTERFACES.format(then=then), sys.executable], capture_output=True, text=True
    )
    if run.returncode == 77:
        pytest.skip("settings of the network cannot be changed here")
    others = ["1.1.1.1", "8.8.4.4"]
    assert run.stdout.strip() == str(["8.8.8.9", "64:ff9b::8.8.8.9", *others] if then else others), run.stderr

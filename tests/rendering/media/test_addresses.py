"""Which addresses are public, how hosts become addresses, and what slow name servers hold up."""

import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from ipaddress import ip_network

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.conftest import until
from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.addresses import MAX_CONCURRENT_LOOK_UPS, Resolver, is_own, is_public
from trio_pool_serve.rendering.media.fetching import ImageFetcher
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

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
        f"64:ff9b:{end}" for end in (":127.0.0.1", ":a00:1", ":169.254.169.254", ":168.63.129.16", "1::1")
    ],
    "in a 6to4 network": ["2002:7f00:1::1", "2002:a00:1::", "2002:a9fe:a9fe::", "2002:a83f:8110::"],
    "in Teredo": ["2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "no address": ["", "localhost", "127.1", "0x7f000001"],
}


@pytest.mark.parametrize("addresses", NOT_PUBLIC.values(), ids=NOT_PUBLIC)
def test_addresses_of_the_internet_are_public_and_no_others(addresses):
    assert [address for address in addresses + PUBLIC if is_public(address)] == PUBLIC


def test_addresses_of_this_machine_are_told_from_others():
    own = ["127.0.0.1", "127.9.9.9"]
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route,
        suppress(OSError),
    ):  # there may be no way out of here
        route.connect(("192.0.2.1", 9))
        own.append(route.getsockname()[0])
    others = ["8.8.8.8", "192.0.2.1", "2001:db8::1", "2606:4700:4700::1111"]
    assert [address for address in own + others if is_own(address)] == own


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


async def test_a_name_has_the_addresses_that_the_system_knows():
    found = await Resolver().resolve("localhost", 80)
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (["127.1", "0x7f.1", "2130706433", "0177.0.0.1"], ["127.0.0.1"]),
        (["no-such-host.invalid", "a" * 64 + ".org", ".", "a..b"], []),
    ],
    ids=["in disguise", "no host"],
)
async def test_an_address_in_disguise_is_resolved_to_what_it_is_and_no_host_to_none(hosts, addresses):
    for host in hosts:
        assert await Resolver().resolve(host, 80) == addresses, host


@pytest.fixture
def answered():
    """When the name server answers; by the end of the test it does."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow(answered: threading.Event) -> Resolver:
    """Its name server does not answer for some hosts before ``answered`` is set."""

    def look_up(host, port, *, type):  # noqa: A002
        if host.endswith("slow.test"):
            answered.wait()
        return [(2, type, 0, "", ("127.0.0.1", port))]

    return Resolver(look_up)


async def leave_look_ups(resolver: Resolver, count: int, clients: int, busy: int) -> None:
    """Ask for names whose name server does not answer, and go away once so many threads wait for it."""
    async with trio.open_nursery() as nursery:
        for n in range(count):
            nursery.start_soon(resolver.resolve, f"{n}.slow.test", 80, n % clients)
        await until(lambda: resolver.turns.statistics().borrowed >= busy)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_look_ups_of_cancelled_requests_take_no_thread_of_others(slow: Resolver, answered: threading.Event):
    await leave_look_ups(slow, 3 * MAX_CONCURRENT_LOOK_UPS, 2, MAX_CONCURRENT_LOOK_UPS)
    assert repr(slow) == "<Resolver 16/16+0>"
    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    assert await slow.resolve("127.0.0.1", 80) == ["127.0.0.1"]

    answered.set()
    await until(lambda: slow.turns.statistics().borrowed == 0)
    assert await slow.resolve("name.test", 80) == ["127.0.0.1"]


async def test_slow_names_of_one_client_leave_look_ups_to_others_even_once_it_has_left(
    slow: Resolver, answered: threading.Event
):
    """A thread keeps its client's turn until it ends."""
    for _ in range(3):
        await leave_look_ups(slow, MAX_CONCURRENT_LOOK_UPS, 1, MAX_CONCURRENT_LOOK_UPS // 2)
    assert slow.turns.statistics().borrowed == MAX_CONCURRENT_LOOK_UPS // 2
    with trio.fail_after(10):
        assert await slow.resolve("name.test", 80, 2) == ["127.0.0.1"]
    answered.set()
    await until(lambda: slow.turns.statistics().borrowed == 0)


async def test_a_look_up_that_takes_too_long_is_the_same_error_for_all(slow: Resolver):
    await leave_look_ups(slow, MAX_CONCURRENT_LOOK_UPS, 2, MAX_CONCURRENT_LOOK_UPS)
    fetching = ImageFetcher(Offload(), 10, 0.1, networks=[ip_network("127.0.0.1")], resolver=slow)
    with pytest.raises(MediaError, match=r"^The image did not arrive within 0\.1 s\.$"):
        await fetching.fetch("http://name.slow.test/", Reservation(MemoryBudget(), Client()))
    assert (fetching.turns.statistics().borrowed, slow.turns.statistics().waiting) == (0, 0)

"""How hosts become addresses, and what name servers that take their time take along."""

import threading
from ipaddress import ip_network

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.errors import MediaError
from trio_pool_serve.rendering.media.addresses import MAX_CONCURRENT_LOOK_UPS, Resolver
from trio_pool_serve.rendering.media.fetching import ImageFetcher
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Client

pytestmark = pytest.mark.unit


async def test_a_name_has_the_addresses_that_the_system_knows():
    found = await Resolver().resolve("localhost", 80)
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "0177.0.0.1"])
async def test_an_address_in_disguise_is_resolved_to_what_it_is(host):
    assert await Resolver().resolve(host, 80) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".org", ".", "a..b"])
async def test_a_host_that_does_not_exist_has_no_address(host):
    assert await Resolver().resolve(host, 80) == []


async def wait_until(fact) -> None:
    with trio.fail_after(10):
        while not fact():  # noqa: ASYNC110
            await trio.sleep(0.001)


@pytest.fixture
def answered():
    """When the name server answers; by the end of the test it does."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow(answered: threading.Event) -> Resolver:
    def look_up(host, port, *, type):  # noqa: A002
        answered.wait()
        return [(2, type, 0, "", ("127.0.0.1", port))]

    return Resolver(look_up)


async def leave_look_ups(resolver: Resolver, count: int) -> None:
    """Ask for names whose name server does not answer, and go away."""
    async with trio.open_nursery() as nursery:
        for n in range(count):
            nursery.start_soon(resolver.resolve, f"{n}.slow.test", 80, n % 2)
        await wait_until(lambda: resolver.statistics().borrowed == MAX_CONCURRENT_LOOK_UPS)
        nursery.cancel_scope.cancel()


async def test_look_ups_of_cancelled_requests_take_no_thread_of_others(slow: Resolver, answered: threading.Event):
    await leave_look_ups(slow, 3 * MAX_CONCURRENT_LOOK_UPS)
    assert (slow.statistics().borrowed, slow.statistics().waiting) == (MAX_CONCURRENT_LOOK_UPS, 0)
    assert repr(slow) == "<Resolver 16/16+0>"
    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    assert await slow.resolve("127.0.0.1", 80) == ["127.0.0.1"]

    answered.set()
    await wait_until(lambda: slow.statistics().borrowed == 0)
    assert await slow.resolve("name.test", 80) == ["127.0.0.1"]
    assert slow.statistics().borrowed == 0


async def test_slow_names_of_one_client_leave_look_ups_to_others_even_once_it_has_left(answered: threading.Event):
    """A thread keeps its client's turn until it ends."""

    def look_up(host, port, *, type):  # noqa: A002
        if host.endswith("slow.test"):
            answered.wait()
        return [(2, type, 0, "", ("127.0.0.1", port))]

    resolver = Resolver(look_up)
    for _ in range(3):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for n in range(MAX_CONCURRENT_LOOK_UPS):
                    nursery.start_soon(resolver.resolve, f"{n}.slow.test", 80, 1)
                await wait_until(lambda: resolver.statistics().borrowed >= MAX_CONCURRENT_LOOK_UPS // 2)
                await wait_all_tasks_blocked()
                scope.cancel()
    assert resolver.statistics().borrowed == MAX_CONCURRENT_LOOK_UPS // 2
    with trio.fail_after(10):
        assert await resolver.resolve("name.test", 80, 2) == ["127.0.0.1"]
    answered.set()
    await wait_until(lambda: resolver.statistics().borrowed == 0)


async def test_a_look_up_that_takes_too_long_is_the_same_error_for_all(slow: Resolver):
    await leave_look_ups(slow, MAX_CONCURRENT_LOOK_UPS)
    fetching = ImageFetcher(Offload(), 10, 0.1, networks=[ip_network("127.0.0.1")], resolver=slow)
    with pytest.raises(MediaError, match=r"^An image did not arrive within 0\.1 s\.$"):
        await fetching.fetch("http://name.test/", Reservation(MemoryBudget(), Client()))
    assert (fetching.statistics().borrowed, slow.statistics().waiting) == (0, 0)

"""Requests hold no more memory than they may, and images are not made ready faster than they are computed."""

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.conftest import reserving
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.rendering.media.cache import MediaCache
from trio_pool_serve.rendering.memory_budget import MAX_CONCURRENT_PREPARATIONS, MemoryBudget, Reservation
from trio_pool_serve.types import Client, ImageFeatures, RenderedPrompt

pytestmark = pytest.mark.unit
CLIENT = Client("a")
IDS = np.zeros(2, dtype=np.int32)
OF_IMAGE = RenderedPrompt(IDS, images=ImageFeatures({"pixel_values": np.zeros((2, 8), dtype=np.float32)}, (2,)))
OF_EMBEDS = RenderedPrompt(IDS, embeds=np.zeros((2, 8), dtype=np.float32))


async def enter(memory: MemoryBudget, entered: list[int], number: int) -> None:
    async with memory.preparing():
        entered.append(number)


@pytest.mark.parametrize("prompt", [OF_IMAGE, OF_EMBEDS])
async def test_while_too_much_is_held_nothing_is_made(prompt):
    memory, entered = MemoryBudget(max_bytes=100), []
    async with trio.open_nursery() as nursery:
        with memory.holding([prompt], CLIENT):
            await enter(memory, entered, 0)
            with memory.holding([prompt, RenderedPrompt(IDS)], CLIENT):
                assert memory.held_bytes == 128
                for number in range(1, 10):
                    nursery.start_soon(enter, memory, entered, number)
                await wait_all_tasks_blocked()
                assert entered == [0]
            await wait_all_tasks_blocked()
            assert sorted(entered) == list(range(10))
    assert memory.held_bytes == 0


async def test_only_some_are_made_at_once():
    memory, let_go, inside = MemoryBudget(), trio.Event(), []

    async def make(client: int) -> None:
        async with memory.preparing(client):
            inside.append(client)
            await let_go.wait()

    async with trio.open_nursery() as nursery:
        for client in (1, 1, 1, 1, 1, 1, 2, 2):
            nursery.start_soon(make, client)
            await wait_all_tasks_blocked()
        assert inside == [1, 1, 1, 2], "one of them is left to others"
        assert len(inside) == MAX_CONCURRENT_PREPARATIONS
        let_go.set()
    assert len(inside) == 8


async def test_who_leaves_holds_nothing():
    memory, entered = MemoryBudget(max_bytes=1), []
    with memory.holding([OF_IMAGE], CLIENT):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(enter, memory, entered, number)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert not entered
    await enter(memory, entered, 0)
    with pytest.raises(ZeroDivisionError), memory.holding([OF_IMAGE], CLIENT):
        raise ZeroDivisionError
    assert memory.held_bytes == 0


def test_what_does_not_fit_is_refused_and_released_with_its_request():
    budget = MemoryBudget(max_bytes=100)
    with reserving(budget, CLIENT) as first, reserving(budget, Client("b")) as second:
        first.grow(60)
        second.grow(40)
        with pytest.raises(OverloadedError, match="all of the server's memory") as refused:
            first.grow(1)
        assert refused.value.reason == "memory"
        assert budget.held_bytes == 100
    assert budget.held_bytes == 0
    assert not budget._by_client


def test_no_client_has_more_than_its_share_but_a_request_alone_may_be_of_any_size():
    budget = MemoryBudget(max_bytes=100)
    other = Reservation(budget, Client("b"))
    with reserving(budget, CLIENT) as first, reserving(budget, CLIENT) as second:
        first.grow(30)
        with pytest.raises(OverloadedError, match="This client's requests"):
            second.grow(21)
        other.grow(50)
        second.grow(20)
    other.release()
    with reserving(budget, CLIENT) as alone:
        alone.grow(60)
        alone.grow(60)
        with pytest.raises(OverloadedError), reserving(budget, Client("b")) as other:
            other.grow(1)


async def test_the_cache_has_what_requests_leave():
    budget = MemoryBudget(max_bytes=300)
    cache = MediaCache(1000, budget)

    async def prepare() -> ImageFeatures:
        return OF_IMAGE.images

    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        for number in range(6):  # of 64 bytes each
            await cache.get(("", bytes([number])), prepare)
        assert cache.statistics().bytes == 4 * 64
        with reserving(budget, CLIENT) as reservation:
            for more, left in ((200, 64), (90, 0)):
                reservation.grow(more)
                assert cache.statistics().bytes == left
            await cache.get(("", b"0"), prepare)
            assert cache.statistics().entries == 0
        nursery.cancel_scope.cancel()


async def test_a_client_waits_for_its_share_and_others_do_not():
    budget = MemoryBudget(max_bytes=200)
    with trio.CancelScope() as scope, budget.holding([OF_IMAGE, OF_IMAGE], CLIENT):
        await budget.wait_for_share(Client("b"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.wait_for_share, CLIENT)
            await wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    await budget.wait_for_share(CLIENT)


async def test_images_of_a_batch_wait_until_those_before_them_leave_room():
    budget, batch = MemoryBudget(max_bytes=256), Client("a", is_background=True)
    rooms = [Reservation(budget, batch, is_of_images=True) for _ in range(3)]
    held = []

    async def wait(number: int) -> None:
        await budget.wait_to_fetch(rooms[number], 1000)
        held.append(number)

    async with trio.open_nursery() as nursery:
        with budget.holding([OF_IMAGE], batch):
            await wait(0)  # half of the share beside the other half, which is computed
            nursery.start_soon(wait, 1)
            await wait_all_tasks_blocked()
            assert (held, budget.held_bytes) == ([0], 128)
        await wait_all_tasks_blocked()
        assert held == [0, 1]
        nursery.start_soon(wait, 2)
        await wait_all_tasks_blocked()
        assert held == [0, 1]
        rooms[0].release()
    assert (held, budget.held_bytes) == ([0, 1, 2], 128)
    for room in rooms:
        room.release()
    assert not budget.fetched
    assert not budget._in_background


async def test_what_others_hold_is_refused_to_a_batch_and_what_it_holds_itself_is_not():
    """It does not wait for memory that other clients hold, because that may take any time."""
    budget, batch = MemoryBudget(max_bytes=100), Client("a", is_background=True)
    with reserving(budget, batch) as first, reserving(budget, batch) as second, reserving(budget, CLIENT) as other:
        first.grow(80)
        second.grow(80)
        other.settle(1)
        with pytest.raises(OverloadedError, match="all of the server's memory"):
            second.grow(1)
        with pytest.raises(OverloadedError, match="all of the server's memory"):
            await budget.wait_to_fetch(Reservation(budget, batch, is_of_images=True), 1)


async def test_nothing_waits_for_what_is_only_reserved():
    """A request that has reserved all of the memory for its own outputs would wait for itself."""
    budget = MemoryBudget(max_bytes=100)
    with reserving(budget, CLIENT) as reservation, budget.holding([RenderedPrompt(IDS)], Client("b")):
        reservation.grow(100)
        with trio.fail_after(10):
            await budget.wait_for_share(CLIENT)
            await budget.wait_until_below_limit()

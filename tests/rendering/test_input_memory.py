"""Images and token embeddings are not made ready faster than they are computed."""

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.rendering.input_memory import MAX_CONCURRENT_PREPARATIONS, InputMemory
from trio_pool_serve.types import ImageFeatures, RenderedPrompt

pytestmark = pytest.mark.unit

IDS = np.zeros(2, dtype=np.int32)
OF_IMAGE = RenderedPrompt(IDS, images=ImageFeatures({"pixel_values": np.zeros((2, 8), dtype=np.float32)}, (2,)))
OF_EMBEDS = RenderedPrompt(IDS, embeds=np.zeros((2, 8), dtype=np.float32))


async def enter(memory: InputMemory, entered: list[int], number: int) -> None:
    async with memory.preparing():
        entered.append(number)


@pytest.mark.parametrize("prompt", [OF_IMAGE, OF_EMBEDS])
async def test_while_too_much_is_held_nothing_is_made(prompt):
    memory, entered = InputMemory(max_bytes=100), []
    async with trio.open_nursery() as nursery:
        with memory.holding([prompt]):
            await enter(memory, entered, 0)
            with memory.holding([prompt, RenderedPrompt(IDS)]):
                assert memory.held_bytes == 128
                for number in range(1, 10):
                    nursery.start_soon(enter, memory, entered, number)
                await wait_all_tasks_blocked()
                assert entered == [0]
            await wait_all_tasks_blocked()
            assert sorted(entered) == list(range(10))
    assert memory.held_bytes == 0


async def test_only_some_are_made_at_once():
    memory, let_go, inside = InputMemory(), trio.Event(), []

    async def make(number: int) -> None:
        async with memory.preparing():
            inside.append(number)
            await let_go.wait()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(make, number)
        await wait_all_tasks_blocked()
        assert len(inside) == MAX_CONCURRENT_PREPARATIONS
        let_go.set()
    assert len(inside) == 10


async def test_who_leaves_holds_nothing():
    memory, entered = InputMemory(max_bytes=1), []
    with memory.holding([OF_IMAGE]):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(enter, memory, entered, number)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert not entered
    await enter(memory, entered, 0)
    with pytest.raises(ZeroDivisionError), memory.holding([OF_IMAGE]):
        raise ZeroDivisionError
    assert memory.held_bytes == 0

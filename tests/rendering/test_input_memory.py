"""Images and token embeddings are not made ready faster than they are computed."""

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.rendering.input_memory import MADE_AT_ONCE, InputMemory
from trio_pool_serve.types import ImageFeatures, RenderedPrompt

IDS = np.zeros(2, dtype=np.int32)
OF_IMAGE = RenderedPrompt(IDS, images=ImageFeatures({"pixel_values": np.zeros((2, 8), dtype=np.float32)}, (2,)))
OF_EMBEDS = RenderedPrompt(IDS, embeds=np.zeros((2, 8), dtype=np.float32))


async def enter(waiting: InputMemory, entered: list[int], number: int) -> None:
    async with waiting.room():
        entered.append(number)


@pytest.mark.parametrize("prompt", [OF_IMAGE, OF_EMBEDS])
async def test_while_too_much_is_held_nothing_is_made(prompt):
    waiting, entered = InputMemory(most=100), []
    async with trio.open_nursery() as nursery:
        with waiting.holding([prompt]):
            await enter(waiting, entered, 0)
            with waiting.holding([prompt, RenderedPrompt(IDS)]):
                assert waiting.held == 128
                for number in range(1, 10):
                    nursery.start_soon(enter, waiting, entered, number)
                await wait_all_tasks_blocked()
                assert entered == [0]
            await wait_all_tasks_blocked()
            assert sorted(entered) == list(range(10))
    assert waiting.held == 0


async def test_only_some_are_made_at_once():
    waiting, let_go, inside = InputMemory(), trio.Event(), []

    async def make(number: int) -> None:
        async with waiting.room():
            inside.append(number)
            await let_go.wait()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(make, number)
        await wait_all_tasks_blocked()
        assert len(inside) == MADE_AT_ONCE
        let_go.set()
    assert len(inside) == 10


async def test_who_leaves_holds_nothing():
    waiting, entered = InputMemory(most=1), []
    with waiting.holding([OF_IMAGE]):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(enter, waiting, entered, number)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert not entered
    await enter(waiting, entered, 0)
    with pytest.raises(ZeroDivisionError), waiting.holding([OF_IMAGE]):
        raise ZeroDivisionError
    assert waiting.held == 0

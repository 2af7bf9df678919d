"""From the prompts of one request to their rows: a nursery with a child per prompt."""

import time
from collections.abc import Sequence

import trio

from trio_pool_serve.engine.interface import Engine
from trio_pool_serve.errors import PoolServeError, innermost
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    Prompt,
    RenderedPrompt,
    RenderingParams,
)

PROMPTS_AHEAD = 2
"""Prompts of one request that wait for a renderer while others of it are rendered.

The limiter's queue is first come, first served: were all prompts of a large request put in it at once,
the single prompt of the next client would wait behind every one of them.
"""


async def compute_rows(
    prompts: Sequence[Prompt],
    *,
    renderer: Renderer,
    engine: Engine,
    rendering: RenderingParams,
    pooling: PoolingParams,
    priority: int,
    timings: RequestTimings,
) -> tuple[list[RenderedPrompt], list[PoolingOutput]]:
    """Render and compute every prompt, concurrently; return both in the prompts' order.

    The first prompt that fails cancels its siblings, and what has not started never runs; its error is
    raised as itself, not as a group. Cancellation: rows that have not been launched leave the queue.
    """
    rendered: dict[int, RenderedPrompt] = {}
    outputs: dict[int, PoolingOutput] = {}
    ahead = trio.CapacityLimiter(renderer.workers + PROMPTS_AHEAD)
    began = time.perf_counter()

    async def one(index: int, prompt: Prompt) -> None:
        try:
            rendered[index] = await renderer.render(prompt, rendering)
        finally:
            ahead.release_on_behalf_of(index)
        # A thread that has come back is no checkpoint: who was cancelled meanwhile must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        timings.render_s = time.perf_counter() - began
        output = await engine.submit(PoolingRequest(rendered[index], pooling, priority))
        timings.add_row(queue_s=output.queue_s, forward_s=output.forward_s, copy_s=output.copy_s)
        outputs[index] = output

    try:
        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                await ahead.acquire_on_behalf_of(index)
                nursery.start_soon(one, index, prompt)
    except BaseExceptionGroup as group:
        expected, rest = group.split(PoolServeError)
        if expected is None or rest is not None:
            raise
        raise innermost(expected) from None
    return [rendered[index] for index in range(len(prompts))], [outputs[index] for index in range(len(prompts))]

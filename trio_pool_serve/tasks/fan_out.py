"""From the rows that one request asks for to their answers: a nursery with a child per row."""

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np
import trio
from attrs import frozen

from trio_pool_serve.engine.interface import Engine
from trio_pool_serve.errors import NotFiniteError, PoolServeError, innermost
from trio_pool_serve.prompts import Prompt, RenderingParams
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    SparseVector,
)

PROMPTS_AHEAD = 2
"""Prompts of one request that wait for a renderer while others of it are rendered.

The limiter's queue is first come, first served: were all prompts of a large request put in it at once,
the single prompt of the next client would wait behind every one of them.
"""


SUBMIT_SLICE = 64
"""Windows of one text that enter the queue between two checkpoints."""


@frozen(eq=False)
class AskedRow:
    """One row as a task asks for it: a prompt, how to render it, and what is wanted of it.

    ``in_windows`` has a prompt that is too long read in several windows.
    """

    prompt: Prompt
    rendering: RenderingParams
    params: tuple[PoolingParams, ...]
    in_windows: bool = False


@frozen(eq=False)
class ComputedWindow:
    """How many tokens the model read in one pass, and what it made of them. What it read may be large, and is gone."""

    tokens: int
    output: PoolingOutput


@frozen(eq=False)
class ComputedRow:
    """One row's answer: a single window, unless it was asked for in several."""

    windows: tuple[ComputedWindow, ...]

    @property
    def values(self) -> tuple[PooledValue, ...]:
        """What each of the row's ``params`` gave for its first window."""
        return self.windows[0].output.values

    @property
    def tokens(self) -> int:
        """Tokens the model read."""
        return sum(window.tokens for window in self.windows)


RowDone = Callable[[int, ComputedRow], None]
"""Called on the loop with each row's index and answer, as soon as it is there; must not take long."""


async def compute_rows(
    rows: Sequence[AskedRow],
    *,
    renderer: Renderer,
    engine: Engine,
    timings: RequestTimings,
    priority: int = 0,
    row_done: RowDone | None = None,
) -> list[ComputedRow]:
    """Render and compute every row, concurrently; return the answers in the rows' order.

    The first row that fails cancels its siblings, and what has not started never runs; its error is
    raised as itself, not as a group. Cancellation: rows that have not been launched leave the queue.
    """
    computed: dict[int, ComputedRow] = {}
    flow = 1 + secrets.randbits(62)
    ahead = trio.CapacityLimiter(renderer.workers + PROMPTS_AHEAD)
    began = time.perf_counter()

    async def one(index: int, row: AskedRow) -> None:
        try:
            render = renderer.render_windows if row.in_windows else renderer.render
            rendered = await render(row.prompt, row.rendering)
        finally:
            ahead.release_on_behalf_of(index)
        # A thread that has come back is no checkpoint: who was cancelled meanwhile must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        timings.render_s = time.perf_counter() - began
        prompts = rendered if isinstance(rendered, list) else [rendered]
        with renderer.waiting.holding(prompts):
            requests = [PoolingRequest(prompt, row.params, priority, flow) for prompt in prompts]
            outputs = await _submit_all(engine, requests)
        for output in outputs:
            timings.add_row(queue_s=output.queue_s, forward_s=output.forward_s, copy_s=output.copy_s)
            require_finite(output.values)
        tokens = [len(prompt.token_ids) for prompt in prompts]
        computed[index] = ComputedRow(tuple(map(ComputedWindow, tokens, outputs)))
        if row_done is not None:
            row_done(index, computed[index])

    try:
        async with trio.open_nursery() as nursery:
            for index, row in enumerate(rows):
                await ahead.acquire_on_behalf_of(index)
                nursery.start_soon(one, index, row)
    except BaseExceptionGroup as group:
        expected, rest = group.split(PoolServeError)
        if expected is None or rest is not None:
            raise
        raise innermost(expected) from None
    return [computed[index] for index in range(len(rows))]


def require_finite(values: Sequence[PooledValue]) -> None:
    """Raise ``NotFiniteError`` for what JSON could not say, and nobody could use."""
    for value in values:
        if not np.isfinite(value.values if isinstance(value, SparseVector) else value).all():
            raise NotFiniteError("The model computed numbers for an input that are not finite.")


async def _submit_all(engine: Engine, requests: Sequence[PoolingRequest]) -> list[PoolingOutput]:
    if len(requests) == 1:
        return [await engine.submit(requests[0])]
    outputs: dict[int, PoolingOutput] = {}

    async def one(index: int, request: PoolingRequest) -> None:
        outputs[index] = await engine.submit(request)

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            nursery.start_soon(one, index, request)
            if index % SUBMIT_SLICE == 0:
                await trio.lowlevel.checkpoint()
    return [outputs[index] for index in range(len(requests))]

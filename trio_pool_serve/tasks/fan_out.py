"""From the rows that one request asks for to their answers: rendered in chunks, computed row by row."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import trio
from attrs import define, field, frozen

from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.errors import NotFiniteError, PoolServeError, innermost
from trio_pool_serve.prompts import Prompt, RenderingParams
from trio_pool_serve.rendering.renderer import Renderer, plain_characters
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseVector,
    Vectors,
)

CHUNK_ROWS = 16
"""Prompts that are rendered by one thread hop."""

CHUNK_CHARACTERS = 8192
"""Of their texts, unless one alone is longer: a chunk takes some milliseconds, and others wait for as long."""

CHUNKS_AHEAD = 2
"""Chunks of one request that wait for a renderer while others of it are rendered.

The limiter's queue is first come, first served: were all prompts of a large request put in it at once,
the single prompt of the next client would wait behind every one of them.
"""


@frozen(eq=False)
class RowToCompute:
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

    @property
    def vector(self) -> Vectors:
        """The vector that the first of the row's ``params`` gave, shape (dimensions,).

        That of several windows is their mean, each weighted by its tokens, and scaled to unit length if all of theirs
        are, as the text's own vector is where there is one window.
        """
        values = [window.output.values[0] for window in self.windows]
        vectors = [value for value in values if not isinstance(value, SparseVector)]
        if len(vectors) == 1:
            return vectors[0]
        weights = np.array([window.tokens for window in self.windows], dtype=np.float32)
        mean: Vectors = np.average(np.stack(vectors), axis=0, weights=weights).astype(np.float32)
        lengths = np.linalg.norm(np.stack(vectors), axis=1)
        return mean / np.linalg.norm(mean) if np.allclose(lengths, 1, atol=1e-3) else mean


RowDone = Callable[[int, ComputedRow], None]
"""Called on the loop with each row's index and answer, as soon as it is there; must not take long."""


async def compute_rows(
    rows: Sequence[RowToCompute],
    *,
    renderer: Renderer,
    engine: Engine,
    timings: RequestTimings,
    priority: int = 0,
    row_done: RowDone | None = None,
) -> list[ComputedRow]:
    """Render and compute every row, in chunks, concurrently; return the answers in the rows' order.

    The first row that fails cancels its siblings, and what has not started never runs; its error is
    raised as itself, not as a group. Cancellation: rows that have not been launched leave the queue.
    """
    computed: dict[int, ComputedRow] = {}
    group = 1 + secrets.randbits(62)
    ahead = trio.CapacityLimiter(renderer.offload.render + CHUNKS_AHEAD)
    began = time.perf_counter()

    def done(index: int, row: ComputedRow) -> None:
        computed[index] = row
        if row_done is not None:
            row_done(index, row)

    async def render(chunk: range) -> list[list[RenderedPrompt]]:
        rendered = await _render([rows[index] for index in chunk], renderer)
        # A thread that has come back is no checkpoint: who was cancelled meanwhile must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        timings.render_s = time.perf_counter() - began
        return rendered

    async def compute(chunk: range, rendered: Sequence[Sequence[RenderedPrompt]]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        requests = [
            PoolingRequest(prompt, rows[index].params, priority, group)
            for index, prompts in zip(chunk, rendered, strict=True)
            for prompt in prompts
        ]
        collected = CollectedRows(chunk, rendered, timings, done)
        with renderer.input_memory.holding(request.prompt for request in requests):
            await engine.submit_all(requests, collected.window_done)

    async def one_of_many(chunk: range) -> None:
        try:
            rendered = await render(chunk)
        finally:
            ahead.release_on_behalf_of(chunk)
        await compute(chunk, rendered)

    chunks = list(_chunks(rows, renderer))
    if len(chunks) == 1:
        await compute(chunks[0], await render(chunks[0]))
    else:
        try:
            async with trio.open_nursery() as nursery:
                for chunk in chunks:
                    await ahead.acquire_on_behalf_of(chunk)
                    nursery.start_soon(one_of_many, chunk)
        except BaseExceptionGroup as group:
            expected, rest = group.split(PoolServeError)
            if expected is None or rest is not None:
                raise
            raise innermost(expected) from None
    return [computed[index] for index in range(len(rows))]


def _chunks(rows: Sequence[RowToCompute], renderer: Renderer) -> Iterator[range]:
    """Cut the rows' indices into chunks; whatever is no plain text is one by itself."""
    begin = characters = 0
    for index, row in enumerate(rows):
        size = plain_characters(row.prompt, row.rendering) if renderer.is_plain(row.prompt) else CHUNK_CHARACTERS
        if index > begin and (index - begin >= CHUNK_ROWS or characters + size > CHUNK_CHARACTERS):
            yield range(begin, index)
            begin, characters = index, 0
        characters += size
    if rows:
        yield range(begin, len(rows))


async def _render(rows: Sequence[RowToCompute], renderer: Renderer) -> list[list[RenderedPrompt]]:
    """Return what the model reads for each row of a chunk, in as many passes as it takes."""
    plain = [(row.prompt, row.rendering, row.in_windows) for row in rows if renderer.is_plain(row.prompt)]
    if len(plain) == len(rows):
        return await renderer.render_plain(plain)
    (row,) = rows
    return [[await renderer.render(row.prompt, row.rendering)]]


@define(eq=False)
class CollectedRows:
    """The rows of one chunk, put together of their windows as those are computed."""

    chunk: range
    rendered: Sequence[Sequence[RenderedPrompt]]
    timings: RequestTimings
    row_done: RowDone
    _places: list[tuple[int, int]] = field(init=False)
    _windows: list[list[ComputedWindow | None]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = [(row, window) for row, prompts in enumerate(self.rendered) for window in range(len(prompts))]
        self._windows = [[None] * len(prompts) for prompts in self.rendered]

    def window_done(self, number: int, output: PoolingOutput) -> None:
        """Take note of the ``number``-th window of the chunk. Raises ``NotFiniteError``."""
        self.timings.add_row(queue_s=output.queue_s, forward_s=output.forward_s, copy_s=output.copy_s)
        require_finite(output.values)
        row, window = self._places[number]
        windows = self._windows[row]
        windows[window] = ComputedWindow(len(self.rendered[row][window].token_ids), output)
        done = tuple(window for window in windows if window is not None)
        if len(done) == len(windows):
            self.row_done(self.chunk[row], ComputedRow(done))


def require_finite(values: Sequence[PooledValue]) -> None:
    """Raise ``NotFiniteError`` for what JSON could not say, and nobody could use."""
    for value in values:
        if not np.isfinite(value.values if isinstance(value, SparseVector) else value).all():
            raise NotFiniteError("The model computed numbers for an input that are not finite.")

"""Renders and computes the rows of one request: in chunks, concurrently."""

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import trio
from attrs import define, field, frozen

from trio_pool_serve.engine.queue_entry import require_finite
from trio_pool_serve.errors import InvalidRequestError, NotFiniteError, PoolServeError, unwrap_exception_groups
from trio_pool_serve.prompts import Prompt, RenderingParams
from trio_pool_serve.rendering.renderer import Renderer, plain_characters
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.request_context import RequestAccounting
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
"""Maximum number of prompts in a chunk, which one thread hop renders."""

WINDOW_CHUNK_ROWS = 256
"""The same for a window of background work: its first rows are not computed before its last are rendered, so that large
chunks keep none of them waiting."""

CHUNK_CHARACTERS = 8192
"""Maximum length of a chunk's texts together, unless one text alone is longer: rendering a chunk takes some
milliseconds, and other requests wait for as long."""

CHUNKS_AHEAD = 2
"""Chunks of one request that wait for a renderer while others of the request are rendered.

A client's prompts are first come, first served: if all prompts of a large request waited at once, the single prompt of
its next request would wait behind every one of them.
"""

_groups = itertools.count(1 + secrets.randbits(62))
"""Numbers of requests, which are unlikely to be another API process's."""


@frozen(eq=False)
class RowToCompute:
    """A prompt, how it is rendered, and the outputs to compute from it.

    With ``in_windows`` a prompt longer than the model's maximum is computed in several windows.
    """

    prompt: Prompt
    rendering: RenderingParams
    params: tuple[PoolingParams, ...]
    in_windows: bool = False


@frozen(eq=False)
class ComputedRow:
    """The outputs of one row, in the order of its ``params``, and the number of tokens computed."""

    values: tuple[PooledValue, ...]
    tokens: int

    @property
    def vector(self) -> Vectors:
        """The first output, for params whose output is dense."""
        vector = self.values[0]
        assert not isinstance(vector, SparseVector)  # noqa: S101  (the caller chose the params)
        return vector


RowDone = Callable[[int, ComputedRow], None]
"""Called on the loop with a row's index and outputs as soon as they are computed; must not take long."""

RenderedWindow = tuple[int, int, RenderedPrompt]
"""Index of a row, index of one of its windows, and the window's model input. Most rows have one window."""


async def compute_rows(
    model: Model, rows: Sequence[RowToCompute], accounting: RequestAccounting, row_done: RowDone | None = None
) -> list[ComputedRow]:
    """Render and compute every row of a request, in chunks, concurrently; return the outputs in the order of the rows.

    The first row that fails cancels the others, and those not yet started never run; its error is raised by itself, not
    in a group. Cancellation: rows that have not been launched leave the queue.
    """
    fan_out = FanOut(model, rows, accounting, row_done)
    chunks = list(_chunks(rows, model.renderer, CHUNK_ROWS if model.window is None else WINDOW_CHUNK_ROWS))
    if len(chunks) == 1:
        await fan_out.submit(await fan_out.render(chunks[0]))
    else:
        await fan_out.compute_concurrently(chunks)
    return [fan_out.computed[index] for index in range(len(rows))]


def _chunks(rows: Sequence[RowToCompute], renderer: Renderer, most_rows: int) -> Iterator[range]:
    """Yield ranges of at most ``most_rows`` row indices; a prompt that is not plain text is a chunk by itself."""
    begin = characters = 0
    for index, row in enumerate(rows):
        size = plain_characters(row.prompt, row.rendering) if renderer.is_plain(row.prompt) else CHUNK_CHARACTERS
        size = max(1, size)  # an empty text would share a chunk with a prompt that is to be by itself
        if index > begin and (index - begin >= most_rows or characters + size > CHUNK_CHARACTERS):
            yield range(begin, index)
            begin, characters = index, 0
        characters += size
    if rows:
        yield range(begin, len(rows))


@define(eq=False)
class FanOut:
    """One call of ``compute_rows``: its rows are rendered, submitted and collected."""

    model: Model
    rows: Sequence[RowToCompute]
    accounting: RequestAccounting
    row_done: RowDone | None
    computed: dict[int, ComputedRow] = field(init=False, factory=dict)
    """Rows of which all windows are computed, by index."""
    _windows: dict[int, list[ComputedRow | None]] = field(init=False, factory=lambda: defaultdict(list))
    """The windows of each submitted row, by the row's index; ``None`` if not computed yet."""
    _group: int = field(init=False, factory=lambda: next(_groups))
    _began: float = field(init=False, factory=time.perf_counter)

    async def compute_concurrently(self, chunks: Sequence[range]) -> None:
        """Render and submit each chunk in a task of its own. Cancellation: as ``compute_rows``."""
        renderer, is_planned = self.model.renderer, self.model.window is not None
        ahead = trio.CapacityLimiter(renderer.offload.render + CHUNKS_AHEAD)
        postponed: list[RenderedWindow] = []

        async def compute(chunk: range) -> None:
            try:
                rendered = await self.render(chunk)
            finally:
                ahead.release_on_behalf_of(chunk)
            if is_planned and renderer.is_plain(self.rows[chunk[0]].prompt):
                postponed.extend(rendered)
            else:
                await self.submit(rendered)  # images hold memory until they are computed

        with unwrap_exception_groups(PoolServeError):
            async with trio.open_nursery() as nursery:
                for chunk in chunks:
                    await ahead.acquire_on_behalf_of(chunk)
                    nursery.start_soon(compute, chunk)
        if postponed:
            # Whether all members of the window wait can be told if each waits for all of its texts at once.
            await self.submit(sorted(postponed, key=lambda window: window[:2]))

    async def render(self, chunk: range) -> list[RenderedWindow]:
        """Render a chunk; return its rows' windows in order. Cancellation: as ``Renderer.render``."""
        renderer, client = self.model.renderer, self.accounting.admitted.work.client
        rows = [self.rows[index] for index in chunk]
        plain = [(row.prompt, row.rendering, row.in_windows) for row in rows if renderer.is_plain(row.prompt)]
        if plain:
            rendered = await renderer.render_plain(plain, client.number)
        else:
            (row,) = rows
            await renderer.memory.wait_for_share(client)
            try:
                rendered = [[await renderer.render(row.prompt, row.rendering, client)]]
            except InvalidRequestError as error:
                error.prompt = row.prompt
                raise
        self.accounting.note_rendered(rendered, time.perf_counter() - self._began)
        by_index = zip(chunk, rendered, strict=True)
        return [(index, *window) for index, prompts in by_index for window in enumerate(prompts)]

    async def submit(self, windows: Sequence[RenderedWindow]) -> None:
        """Compute all windows of some rows, and collect their outputs. Cancellation: as ``compute_rows``."""
        # Returning from a thread is no checkpoint: a request cancelled meanwhile must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        work = self.accounting.admitted.work
        turn = work.priority, self._group, work.client.number, work.rank, work.deadline
        requests: list[PoolingRequest] = []
        for index, _, prompt in windows:
            requests.append(PoolingRequest(prompt, self.rows[index].params, *turn))
            self._windows[index].append(None)
        with self.accounting.computing(requests):
            await self.model.submit_all(requests, partial(self.collect, windows), self.accounting.timings)

    def collect(self, submitted: Sequence[RenderedWindow], number: int, output: PoolingOutput) -> None:
        """Take the output of the ``number``-th submitted window; call ``row_done`` once a row has all of its windows.

        Raises ``NotFiniteError``, or ``InvalidRequestError`` if the numbers come of the request's own embeddings.
        """
        index, window, prompt = submitted[number]
        self.accounting.note_computed(prompt, output)
        try:
            require_finite(number, output)
        except NotFiniteError:
            if prompt.embeds is None:
                raise
            reason = "What the model computes from these token embeddings is not finite."
            raise InvalidRequestError(reason, field="prompts") from None
        windows = self._windows[index]
        windows[window] = ComputedRow(output.values, len(prompt.token_ids))
        computed = [each for each in windows if each is not None]
        if len(computed) == len(windows):
            self.computed[index] = computed[0] if len(computed) == 1 else _joined(computed)
            if self.row_done is not None:
                self.row_done(index, self.computed[index])


def _joined(windows: Sequence[ComputedRow]) -> ComputedRow:
    """Return a row whose vector is the mean of the windows' vectors, weighted by their tokens, shape (dimensions,).

    It is scaled to unit length if all of theirs have unit length, as the vector of a text in one window would be.
    """
    vectors, tokens = np.stack([window.vector for window in windows]), [window.tokens for window in windows]
    mean: Vectors = np.average(vectors, axis=0, weights=np.array(tokens, dtype=np.float32)).astype(np.float32)
    is_normalized = np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    return ComputedRow((mean / np.linalg.norm(mean) if is_normalized else mean,), sum(tokens))

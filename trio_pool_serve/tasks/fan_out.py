"""Renders and computes the rows of one request: in chunks, concurrently."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import trio
from attrs import define, field, frozen

from trio_pool_serve.engine.admission import AdmittedRequest
from trio_pool_serve.engine.engine import require_finite
from trio_pool_serve.errors import InvalidRequestError, NotFiniteError, PoolServeError, unwrap_exception_groups
from trio_pool_serve.prompts import Prompt, RenderingParams
from trio_pool_serve.rendering.renderer import Renderer, plain_characters
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    Client,
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


async def compute_rows(
    model: Model,
    rows: Sequence[RowToCompute],
    timings: RequestTimings,
    admitted: AdmittedRequest,
    *,
    row_done: RowDone | None = None,
) -> list[ComputedRow]:
    """Render and compute every row of a request, in chunks, concurrently; return the outputs in the order of the rows.

    ``admitted`` is told of their lengths, and of those that are computed.

    The first row that fails cancels the others, and those not yet started never run; its error is raised by itself, not
    in a group. Cancellation: rows that have not been launched leave the queue.
    """
    computed: dict[int, ComputedRow] = {}
    group = next(_groups)
    ahead = trio.CapacityLimiter(model.renderer.offload.render + CHUNKS_AHEAD)
    began = time.perf_counter()

    def done(index: int, row: ComputedRow) -> None:
        computed[index] = row
        if row_done is not None:
            row_done(index, row)

    async def render(chunk: range) -> list[list[RenderedPrompt]]:
        renderer, client = model.renderer, admitted.work.client
        if not renderer.is_plain(rows[chunk[0]].prompt):
            await renderer.memory.wait_for_share(client)
        rendered = await _render([rows[index] for index in chunk], renderer, client)
        # Returning from a thread is no checkpoint: a request cancelled meanwhile must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        timings.render_s = time.perf_counter() - began
        admitted.note_rendered(itertools.chain.from_iterable(rendered), len(chunk))
        return rendered

    async def compute(chunk: Sequence[int], rendered: Sequence[Sequence[RenderedPrompt]]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        work = admitted.work
        requests = [
            PoolingRequest(
                prompt,
                rows[index].params,
                work.priority,
                group,
                work.client.number,
                work.rank,
                work.deadline,
                is_alone=len(rows) == len(prompts) == 1,
            )
            for index, prompts in zip(chunk, rendered, strict=True)
            for prompt in prompts
        ]
        timings.add_rendered(rows=len(requests), tokens=sum(request.tokens for request in requests))
        outputs = ChunkOutputs(chunk, rendered, timings, admitted, done)
        with model.renderer.memory.holding((request.prompt for request in requests), work.client):
            await model.submit_all(requests, outputs.add, timings)

    rendered_chunks: dict[range, list[list[RenderedPrompt]]] = {}

    async def render_one_of_several(chunk: range) -> None:
        try:
            rendered = await render(chunk)
        finally:
            ahead.release_on_behalf_of(chunk)
        if model.window is None or not model.renderer.is_plain(rows[chunk[0]].prompt):
            await compute(chunk, rendered)  # images hold memory until they are computed
        else:
            rendered_chunks[chunk] = rendered

    chunks = list(_chunks(rows, model.renderer, CHUNK_ROWS if model.window is None else WINDOW_CHUNK_ROWS))
    if len(chunks) == 1:
        await compute(chunks[0], await render(chunks[0]))
    else:
        with unwrap_exception_groups(PoolServeError):
            async with trio.open_nursery() as nursery:
                for chunk in chunks:
                    await ahead.acquire_on_behalf_of(chunk)
                    nursery.start_soon(render_one_of_several, chunk)
        if rendered_chunks:
            # Whether all members of the window wait can be told if each waits for all of its texts at once.
            texts = [chunk for chunk in chunks if chunk in rendered_chunks]
            indices = [index for chunk in texts for index in chunk]
            await compute(indices, [prompts for chunk in texts for prompts in rendered_chunks[chunk]])
    return [computed[index] for index in range(len(rows))]


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


async def _render(rows: Sequence[RowToCompute], renderer: Renderer, client: Client) -> list[list[RenderedPrompt]]:
    """Return the model inputs of each row of a chunk: one, or one for each window."""
    plain = [(row.prompt, row.rendering, row.in_windows) for row in rows if renderer.is_plain(row.prompt)]
    if len(plain) == len(rows):
        return await renderer.render_plain(plain, client.number)
    (row,) = rows
    return [[await renderer.render(row.prompt, row.rendering, client)]]


@define(eq=False)
class ChunkOutputs:
    """Collects the outputs of one chunk, and calls ``row_done`` for each row whose windows are all computed."""

    chunk: Sequence[int]
    rendered: Sequence[Sequence[RenderedPrompt]]
    timings: RequestTimings
    admitted: AdmittedRequest
    row_done: RowDone
    _places: list[tuple[int, int]] = field(init=False)
    """Row and window of each output, in the order in which they were submitted."""
    _windows: list[list[tuple[PooledValue, ...] | None]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = [(row, window) for row, prompts in enumerate(self.rendered) for window in range(len(prompts))]
        self._windows = [[None] * len(prompts) for prompts in self.rendered]

    def add(self, number: int, output: PoolingOutput) -> None:
        """Add the output of the ``number``-th window of the chunk.

        Raises ``NotFiniteError``, or ``InvalidRequestError`` if the numbers come of the request's own embeddings.
        """
        self.timings.add_row(queue_s=output.queue_s, forward_s=output.forward_s, copy_s=output.copy_s)
        row, window = self._places[number]
        try:
            require_finite(number, output)
        except NotFiniteError:
            if self.rendered[row][window].embeds is None:
                raise
            reason = "What the model computes from these token embeddings is not finite."
            raise InvalidRequestError(reason, field="prompts") from None
        self.admitted.note_computed(self.rendered[row][window])
        self._windows[row][window] = output.values
        computed = [values for values in self._windows[row] if values is not None]
        if len(computed) == len(self._windows[row]):
            tokens = [len(prompt.token_ids) for prompt in self.rendered[row]]
            values = computed[0] if len(computed) == 1 else (_mean([values[0] for values in computed], tokens),)
            self.row_done(self.chunk[row], ComputedRow(values, sum(tokens)))


def _mean(windows: Sequence[PooledValue], tokens: Sequence[int]) -> Vectors:
    """Return the mean of the windows' vectors, weighted by their tokens, shape (dimensions,).

    It is scaled to unit length if all of theirs have unit length, as the vector of a text in one window would be.
    """
    vectors = np.stack([vector for vector in windows if not isinstance(vector, SparseVector)])
    mean: Vectors = np.average(vectors, axis=0, weights=np.array(tokens, dtype=np.float32)).astype(np.float32)
    is_normalized = np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    return mean / np.linalg.norm(mean) if is_normalized else mean

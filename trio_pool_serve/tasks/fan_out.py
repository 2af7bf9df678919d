"""Renders and computes the rows of one request: in chunks, concurrently."""

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.engine.admission import AdmittedRequest
from trio_pool_serve.engine.queue_entry import Outputs, are_finite, require_finite
from trio_pool_serve.errors import (
    InvalidRequestError,
    JobField,
    NotFiniteError,
    Place,
    PoolServeError,
    unwrap_exception_groups,
)
from trio_pool_serve.prompts import PairPrompt, Prompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import Renderer, plain_characters
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseVector,
    Vectors,
)

CHUNK_ROWS = 16
"""Maximum number of prompts in a chunk, which is rendered in one thread hop."""

WINDOW_CHUNK_ROWS = 256
"""The same for a window of background work: no row is computed before all are rendered, so large chunks delay none."""

CHUNK_CHARACTERS = 8192
"""Maximum total length of a chunk's texts, unless a single text is longer: rendering a chunk takes milliseconds, for
which other requests wait."""

CHUNKS_AHEAD = 2
"""Chunks of a request that wait for a renderer while others of it are rendered.

A client's prompts are rendered in order of arrival: if all prompts of a large request waited, the single prompt of the
client's next request would wait behind them.
"""

_groups = itertools.count(1 + secrets.randbits(62))
"""Request numbers, which are unlikely to occur in another API process."""


@define(eq=False)
class RowToCompute:
    """A prompt, how to render it, and the outputs to compute from it.

    With ``in_windows``, a prompt longer than the model's maximum is computed in several windows.
    """

    prompt: Prompt
    rendering: RenderingParams
    params: tuple[PoolingParams, ...]
    in_windows: bool = False


class ComputedRow(NamedTuple):
    """The outputs of a row, in the order of its ``params``, and its number of tokens."""

    values: tuple[PooledValue, ...]
    tokens: int

    @property
    def vector(self) -> Vectors:
        """The first output, for params whose output is dense."""
        vector = self.values[0]
        assert not isinstance(vector, SparseVector)  # noqa: S101  (the caller chose the params)
        return vector


RowDone = Callable[[int, ComputedRow], None]
"""Called on the event loop with a row's index and outputs as soon as they are computed; must be fast."""

Reserve = Callable[[int], object]
"""Reserves memory for this many vectors of tokens, before the rows that have them are queued; raises if it may not."""

RenderedWindow = tuple[int, int, RenderedPrompt]
"""Index of a row, index of one of its windows, and the window's model input. Most rows have one window."""


async def compute_rows(
    model: Model,
    rows: Sequence[RowToCompute],
    admitted: AdmittedRequest,
    timings: RequestTimings,
    row_done: RowDone | None = None,
    fields: Mapping[JobField, int] | None = None,
    reserve: Reserve | None = None,
) -> list[ComputedRow]:
    """Render and compute the rows of a request concurrently, in chunks; return the outputs in the order of the rows.

    Equal rows are computed once: with others in their batches, they would differ in the last bits.

    ``fields`` are the job's fields that the rows are from, in order, each with its number of rows; without it all are
    from ``prompts``. With ``reserve``, no plain row is queued before all of them are rendered.

    The first failure cancels all other rows; its error is raised, not in a group. Cancellation: rows that have not been
    launched leave the queue.
    """
    equal = _equal_rows(rows)
    fan_out = FanOut(model, rows, equal, admitted, timings, row_done, fields or {"prompts": len(rows)}, reserve)
    first, most_rows = [*equal], CHUNK_ROWS if model.window is None else WINDOW_CHUNK_ROWS
    several = len(first) != 1
    ranges = _chunks([rows[index] for index in first], model.renderer, most_rows) if several else [range(1)]
    chunks = [tuple([first[index] for index in each]) for each in ranges]
    if len(chunks) == 1:
        await fan_out.submit(await fan_out.render(chunks[0]))
    else:
        await fan_out.compute_concurrently(chunks)
    return [fan_out.computed[index] for index in range(len(rows))]


def _equal_rows(rows: Sequence[RowToCompute]) -> dict[int, list[int]]:
    """Return the indices of rows that have equal texts and the same object as ``params``, by the first of them.

    1,024 rows of 550 characters take 0.7 ms.
    """
    if len(rows) == 1:
        return {0: [0]}
    places: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        is_text = isinstance(row.prompt, TextPrompt | PairPrompt)
        key = (row.prompt, row.rendering, id(row.params), row.in_windows) if is_text else index
        places.setdefault(key, []).append(index)
    return {indices[0]: indices for indices in places.values()}


def _chunks(rows: Sequence[RowToCompute], renderer: Renderer, most_rows: int) -> Iterator[range]:
    """Yield ranges of at most ``most_rows`` row indices; a prompt that is not plain text is a chunk by itself."""
    begin = characters = 0
    for index, row in enumerate(rows):
        size = plain_characters(row.prompt, row.rendering) if renderer.is_plain(row.prompt) else CHUNK_CHARACTERS
        size = max(1, size)  # or an empty text would share a chunk with a prompt that is not plain
        if index > begin and (index - begin >= most_rows or characters + size > CHUNK_CHARACTERS):
            yield range(begin, index)
            begin, characters = index, 0
        characters += size
    if rows:
        yield range(begin, len(rows))


@define(eq=False)
class FanOut:
    """One call of ``compute_rows``: renders, submits and collects its rows."""

    model: Model
    rows: Sequence[RowToCompute]
    equal: Mapping[int, Sequence[int]]
    """The rows to compute, each with all rows that are equal to it, itself among them; all by index."""
    admitted: AdmittedRequest
    timings: RequestTimings
    row_done: RowDone | None
    fields: Mapping[JobField, int]
    reserve: Reserve | None
    computed: dict[int, ComputedRow] = field(init=False, factory=dict)
    """Rows by index, once all of their windows are computed."""
    _windows: dict[int, list[ComputedRow | None]] = field(init=False, factory=partial(defaultdict, list))
    """The windows of each submitted row by the row's index; ``None`` until computed."""
    _group: int = field(init=False, factory=_groups.__next__)
    _began: float = field(init=False, factory=time.perf_counter)

    async def compute_concurrently(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Render and submit each chunk in its own task. Cancellation: as ``compute_rows``."""
        renderer, is_postponed = self.model.renderer, self.model.window is not None or self.reserve is not None
        ahead = trio.CapacityLimiter(renderer.offload.render + CHUNKS_AHEAD)
        postponed: list[RenderedWindow] = []

        async def compute(chunk: tuple[int, ...]) -> None:
            try:
                rendered = await self.render(chunk)
            finally:
                ahead.release_on_behalf_of(chunk)
            if is_postponed and renderer.is_plain(self.rows[chunk[0]].prompt):
                postponed.extend(rendered)
            else:
                await self.submit(rendered)  # images hold memory until they are computed

        with unwrap_exception_groups(PoolServeError):
            async with trio.open_nursery() as nursery:
                for chunk in chunks:
                    await ahead.acquire_on_behalf_of(chunk)
                    nursery.start_soon(compute, chunk)
        if postponed:
            # In one call: a member of a planned window counts as waiting from its first one on.
            await self.submit(sorted(postponed, key=lambda window: window[:2]))

    async def render(self, chunk: tuple[int, ...]) -> list[RenderedWindow]:
        """Render a chunk; return its rows' windows in order. Cancellation: as ``Renderer.render``."""
        renderer, client = self.model.renderer, self.admitted.work.client
        rows = [self.rows[index] for index in chunk]
        try:
            if renderer.is_plain(rows[0].prompt):
                plain: Any = [(row.prompt, row.rendering, row.in_windows) for row in rows]  # all rows of the chunk are
                rendered = await renderer.render_plain(plain, client.number)
            else:
                (row,) = rows
                await renderer.memory.wait_for_share(client)
                rendered = [[await renderer.render(row.prompt, row.rendering, client)]]
        except InvalidRequestError as error:
            error.place = self._place_of(chunk[error.row])
            raise
        self.timings.render_s = time.perf_counter() - self._began
        self.admitted.note_rendered(
            [prompt for prompts in rendered for prompt in prompts], sum([len(self.equal[index]) for index in chunk])
        )
        by_index = zip(chunk, rendered, strict=True)
        return [(index, *window) for index, prompts in by_index for window in enumerate(prompts)]

    async def submit(self, windows: Sequence[RenderedWindow]) -> None:
        """Compute all windows of some rows, and collect their outputs. Cancellation: as ``compute_rows``."""
        # Returning from a thread is not a checkpoint, and a cancelled request must not enter the queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        work = self.admitted.work
        turn = work.priority, self._group, work.client.number, work.rank, work.deadline
        requests: list[PoolingRequest] = []
        for index, _, prompt in windows:
            row = self.rows[index]
            requests.append(PoolingRequest(prompt, row.params, *turn, adapter=self.model.adapter_of(row.rendering)))
            self._windows[index].append(None)
        if self.reserve is not None:
            self.reserve(
                sum(
                    len(self.equal[index]) * (len(prompt.token_ids) if prompt.kept is None else int(prompt.kept.sum()))
                    for index, _, prompt in windows
                )
            )
        self.timings.add_rendered(
            rows=len(requests),
            tokens=sum([len(self.equal[index]) * len(prompt.token_ids) for index, _, prompt in windows]),
        )
        with self.model.renderer.memory.holding([request.prompt for request in requests], work.client):
            await self.model.submit_all(requests, partial(self.collect, windows), self.timings)

    def collect(self, submitted: Sequence[RenderedWindow], outputs: Outputs) -> None:
        """Store outputs, by the indices of their windows in ``submitted``; call ``row_done`` for each complete row.

        Raises ``NotFiniteError``, or ``InvalidRequestError`` if the request has sent token embeddings.
        """
        self.timings.add_rows([output for _, output in outputs])
        self.admitted.note_computed(*[submitted[number][2] for number, _ in outputs])
        try:
            require_finite(outputs)
        except NotFiniteError as error:
            if submitted[0][2].embeds is None:  # else it is the only row
                error.place = self._place_of(next(submitted[row[0]][0] for row in outputs if not are_finite([row])))
                raise
            raise InvalidRequestError(
                "The model's output for these token embeddings is not finite.", field="prompts"
            ) from None
        for number, output in outputs:
            index, window, prompt = submitted[number]
            windows = self._windows[index]
            windows[window] = ComputedRow(output.values, len(prompt.token_ids))
            computed = [each for each in windows if each is not None]
            if len(computed) == len(windows):
                row = computed[0] if len(computed) == 1 else _joined(computed)
                for each in self.equal[index]:
                    self.computed[each] = row
                    if self.row_done is not None:
                        self.row_done(each, row)

    def _place_of(self, index: int) -> Place:
        """Return where a row's input is; a pair is named after its document."""
        places = [(name, at if rows > 1 else None) for name, rows in self.fields.items() for at in range(rows)]
        name, at = places[index]
        is_document = name == "documents" and isinstance(self.rows[index].prompt, PairPrompt)
        return Place(name, at, " with its query" if is_document else "")


def _joined(windows: Sequence[ComputedRow]) -> ComputedRow:
    """Return a row with the mean of the windows' vectors, weighted by their tokens, shape (dimensions,).

    If all of them have unit length, it is scaled to unit length, as the vector of a single window would be; windows
    that cancel each other out give zeros, as a normalised vector of zeros does.
    """
    vectors = np.stack([window.vector for window in windows], dtype=np.float64)  # sums of float32 may overflow
    tokens = [window.tokens for window in windows]
    mean = np.average(vectors, axis=0, weights=tokens)
    if np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3):
        mean /= max(float(np.linalg.norm(mean)), 1e-12)
    return ComputedRow((mean.astype(np.float32),), sum(tokens))

"""Prompts to whatever a model has to say about each of them."""

from collections.abc import Callable, Mapping, Sequence

from attrs import Factory, frozen

from trio_pool_serve.tasks.embed import embed_params, vector_of
from trio_pool_serve.tasks.fan_out import AskedRow, ComputedRow, compute_rows
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.reading import ReadingParams, rendering_params
from trio_pool_serve.tasks.token_embed import token_embed_params
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    Activation,
    Classify,
    PooledValue,
    PoolingParams,
    PoolingTask,
    Prompt,
    TokenClassify,
)


@frozen(eq=False, kw_only=True)
class PoolJob:
    """What a client asks about its prompts, in nobody's dialect.

    ``tasks`` may be several: all of them are answered by one forward pass. ``dimensions`` and ``normalize`` are
    for vectors, ``activation`` is for labels.
    """

    prompts: Sequence[Prompt]
    tasks: tuple[PoolingTask, ...] = ("embed",)
    reading: ReadingParams = Factory(ReadingParams)
    dimensions: int | None = None
    normalize: bool | None = None
    activation: Activation = "probabilities"
    priority: int = 0

    @property
    def estimated_tokens(self) -> int:
        """A cheap guess of all prompts' tokens, for admission."""
        return sum(prompt.estimated_tokens for prompt in self.prompts) + self.reading.estimated_tokens(
            len(self.prompts)
        )


PooledRow = tuple[PooledValue, ...]
"""One prompt's answers, in the order of the job's ``tasks``."""


@frozen(eq=False)
class Pooled:
    """The answer: a row per prompt, in order, and the tokens that were read."""

    rows: list[PooledRow]
    prompt_tokens: int


TASKS: Mapping[PoolingTask, Callable[[Model, PoolJob], PoolingParams]] = {
    "embed": lambda model, job: embed_params(model, dimensions=job.dimensions, normalize=job.normalize),
    "token_embed": lambda model, job: token_embed_params(model, dimensions=job.dimensions, normalize=job.normalize),
    "sparse_embed": lambda model, job: model.folder.architecture.sparse_params(job.reading.role),
    "classify": lambda _, job: Classify(job.activation),
    "token_classify": lambda _, job: TokenClassify(job.activation),
}
"""What each task asks of the engine. ``score`` is about two texts: ``tasks.score``."""


def asked_rows(model: Model, job: PoolJob) -> list[AskedRow]:
    """Return what a job asks of the engine. Raises ``InvalidRequestError`` if the model cannot be asked that."""
    for task in job.tasks:
        model.require(task)
    params = tuple(TASKS[task](model, job) for task in job.tasks)
    rendering = rendering_params(model, job.reading)
    in_windows = model.splits_long_texts and job.tasks == ("embed",) and rendering.truncate_to is None
    return [AskedRow(prompt, rendering, params, in_windows) for prompt in job.prompts]


async def pool(
    model: Model,
    job: PoolJob,
    timings: RequestTimings,
    row_done: Callable[[int, PooledRow, int], None] | None = None,
) -> Pooled:
    """Return what a model makes of a job's prompts.

    ``row_done(index, row, tokens)`` is called on the loop as soon as a prompt's row is there. Raises
    ``InvalidRequestError``, ``OverloadedError`` and what ``Engine.submit`` raises. Cancellation: at once;
    nothing of the job stays in the queue.
    """
    asked = asked_rows(model, job)
    estimate = job.estimated_tokens
    if not any(row.in_windows for row in asked):
        estimate = min(estimate, len(asked) * model.renderer.max_model_len)

    def values_of(row: ComputedRow) -> PooledRow:
        return (vector_of(row),) if len(row.windows) > 1 else row.values

    def done(index: int, row: ComputedRow) -> None:
        if row_done is not None:
            row_done(index, values_of(row), row.tokens)

    with model.engine.admit(estimate):
        rows = await compute_rows(
            asked,
            renderer=model.renderer,
            engine=model.engine,
            timings=timings,
            priority=job.priority,
            row_done=done,
        )
    return Pooled([values_of(row) for row in rows], sum(row.tokens for row in rows))

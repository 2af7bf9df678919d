"""Prompts to whatever a model has to say about each of them."""

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.fan_out import ComputedRow, RowToCompute, compute_rows
from trio_pool_serve.tasks.input_params import rendering_params
from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.pooling_tasks import CLASSIFY, EMBED, SPARSE_EMBED, TOKEN_CLASSIFY, TOKEN_EMBED
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import PooledValue

MAX_TOKEN_NUMBERS = 32_000_000
"""Numbers in one answer of vectors per token: 128 MB of them, and several times that as JSON."""

PooledRow = tuple[PooledValue, ...]
"""One prompt's answers, in the order of the job's ``tasks``."""


@frozen(eq=False)
class Pooled:
    """The answer: a row per prompt, in order, and the tokens that were read."""

    rows: list[PooledRow]
    prompt_tokens: int


TASKS: Mapping[str, Task] = {
    "embed": EMBED,
    "token_embed": TOKEN_EMBED,
    "sparse_embed": SPARSE_EMBED,
    "classify": CLASSIFY,
    "token_classify": TOKEN_CLASSIFY,
}
"""What can be asked about one prompt, one line each. What is asked about two is in ``tasks.score``."""


def task_named(name: str) -> Task:
    """Return a task. Raises ``InvalidRequestError`` if there is none of that name."""
    if name not in TASKS:
        raise InvalidRequestError(f"There is no task {name!r}; there are: {', '.join(TASKS)}.", field="tasks")
    return TASKS[name]


def rows_to_compute(model: Model, job: PoolJob) -> list[RowToCompute]:
    """Return what a job asks of the engine. Raises ``InvalidRequestError`` if the model cannot be asked that."""
    tasks = [task_named(name) for name in job.tasks]
    for task in tasks:
        model.require(task.needs)
    params = tuple(task.params(model, job) for task in tasks)
    rendering = rendering_params(model, job.input_params)
    in_windows = model.splits_long_texts and job.tasks == ("embed",) and rendering.truncate_to is None
    return [RowToCompute(prompt, rendering, params, in_windows) for prompt in job.prompts]


def estimated_tokens(model: Model, job: PoolJob, asked: Sequence[RowToCompute]) -> int:
    """Guess cheaply how many tokens are read, for admission.

    Raises ``InvalidRequestError`` for an answer of vectors per token that would fill the memory.
    """
    estimate = sum(map(model.renderer.estimated_tokens, job.prompts)) + job.input_params.estimated_tokens(
        len(job.prompts)
    )
    if not any(row.in_windows for row in asked):
        estimate = min(estimate, len(asked) * model.renderer.max_model_len)
    numbers = estimate * model.engine.dimensions
    if "token_embed" in job.tasks and numbers > MAX_TOKEN_NUMBERS:
        raise InvalidRequestError(
            f"About {estimate} tokens with {model.engine.dimensions} numbers each are more than the "
            f"{MAX_TOKEN_NUMBERS} that one answer may have; ask in smaller parts.",
            field="prompts",
        )
    return estimate


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
    asked = rows_to_compute(model, job)
    finishes = [TASKS[name].finish for name in job.tasks]

    finished: dict[int, PooledRow] = {}

    def done(index: int, row: ComputedRow) -> None:
        values = (row.vector,) if len(row.windows) > 1 else row.values
        finished[index] = tuple(finish(value) for finish, value in zip(finishes, values, strict=True))
        if row_done is not None:
            row_done(index, finished[index], row.tokens)

    with model.engine.admit(estimated_tokens(model, job, asked)):
        rows = await compute_rows(
            asked,
            renderer=model.renderer,
            engine=model.engine,
            timings=timings,
            priority=job.priority,
            row_done=done,
        )
    return Pooled([finished[index] for index in range(len(rows))], sum(row.tokens for row in rows))

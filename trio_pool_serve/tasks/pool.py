"""Pooling: the tasks about one prompt, and how a job of them is computed."""

from collections.abc import Callable, Sequence

from attrs import frozen

from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.prompts import has_images
from trio_pool_serve.tasks.fan_out import ComputedRow, RowToCompute, compute_rows
from trio_pool_serve.tasks.input_params import rendering_params
from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.types import Classify, Embed, EmbedChunks, PooledValue, TokenClassify, TokenEmbed

MAX_TOKEN_NUMBERS = 32_000_000
"""Most numbers in a response with vectors per token: 128 MB, and several times that as JSON."""

BYTES_PER_NUMBER = 4

BYTES_PER_NUMBER_OF_RESPONSE = 16
"""4 in the vector, and about 12 in the response's JSON, which is kept until the client has read it."""

PooledRow = tuple[PooledValue, ...]
"""One prompt's outputs, in the order of the job's ``tasks``."""


@frozen(eq=False)
class Pooled:
    """The outputs of a job, a row per prompt in the order of the prompts, and the number of tokens of each."""

    rows: list[PooledRow]
    tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens computed in all."""
        return sum(self.tokens)


def check_dimensions(model: Model, dimensions: int | None) -> None:
    """Raise ``InvalidRequestError`` unless the model's vectors can be truncated to that length."""
    if dimensions is not None and not 1 <= dimensions <= model.engine.facts.dimensions:
        limit = model.engine.facts.dimensions
        raise InvalidRequestError(
            f"{{dimensions}} must be from 1 to {limit}, the model's own, not {dimensions}.", field="dimensions"
        )


def _embed_params(model: Model, job: PoolJob) -> Embed:
    check_dimensions(model, job.dimensions)
    if job.document is not None:
        spec = model.folder.spec
        if not spec.pools_chunks:
            reason = "reads texts by a chat template" if spec.uses_chat_template else f"pools by {spec.pooling}"
            raise InvalidRequestError(
                f"Late chunking takes the mean of the token states of each chunk, and this model {reason}.",
                field="chunks",
            )
        return EmbedChunks(dimensions=job.dimensions, normalize=job.normalize)
    return Embed(dimensions=job.dimensions, normalize=job.normalize)


def _token_embed_params(model: Model, job: PoolJob) -> TokenEmbed:
    check_dimensions(model, job.dimensions)
    return TokenEmbed(dimensions=job.dimensions, normalize=job.normalize)


TASKS: dict[str, Task] = {
    "embed": Task("embed", _embed_params),
    "token_embed": Task("token_embed", _token_embed_params),
    "sparse_embed": Task(
        "sparse_embed", lambda model, job: model.folder.spec.sparse_params(job.input_params.effective_input_type)
    ),
    "classify": Task("classify", lambda _, job: Classify(job.activation)),
    "token_classify": Task("token_classify", lambda _, job: TokenClassify(job.activation)),
}
"""The tasks about one prompt. Scoring, about two, is in ``tasks.score``."""


def task_named(name: str) -> Task:
    """Return a task. Raises ``InvalidRequestError`` for an unknown name."""
    if name not in TASKS:
        raise InvalidRequestError(
            f"There is no task {name!r}: it should be {', '.join(map(repr, TASKS))} (literal_error).", field="tasks"
        )
    return TASKS[name]


def rows_to_compute(model: Model, job: PoolJob) -> list[RowToCompute]:
    """Return a job's prompts with their params. Raises ``InvalidRequestError`` if the model cannot compute them."""
    tasks = [task_named(name) for name in job.tasks]
    for task in tasks:
        model.require(task.needs)
    params = tuple(task.params(model, job) for task in tasks)
    rendering = rendering_params(model, job.input_params)
    is_text = job.tasks == ("embed",) and job.document is None
    in_windows = model.long_text == "chunk" and is_text and rendering.truncate_to is None
    return [RowToCompute(prompt, rendering, params, in_windows) for prompt in job.prompts]


def estimated_work(model: Model, job: PoolJob, rows: Sequence[RowToCompute], context: RequestContext) -> EstimatedWork:
    """Return what a job asks of the engine, with its tokens estimated without tokenising.

    Raises ``InvalidRequestError`` if vectors per token would have more than ``MAX_TOKEN_NUMBERS`` numbers.
    """
    estimate = sum(map(model.renderer.estimated_tokens, job.prompts)) + job.input_params.estimated_tokens(len(rows))
    if not any(row.in_windows for row in rows):
        estimate = min(estimate, len(rows) * model.renderer.max_model_len)
    numbers = estimate * model.engine.facts.dimensions
    if "token_embed" in job.tasks and numbers > MAX_TOKEN_NUMBERS:
        raise InvalidRequestError(
            f"About {estimate} tokens with {model.engine.facts.dimensions} numbers each are more than the "
            f"{MAX_TOKEN_NUMBERS} that one response may have; send fewer inputs at a time.",
            field="prompts",
        )
    return context.work(estimate, len(rows), priority=job.priority, has_images=any(map(has_images, job.prompts)))


def _reserve(model: Model, context: RequestContext, vectors: int) -> None:
    """Reserve memory for vectors before they are computed. Raises ``OverloadedError``."""
    # Responses to lines of batches wait for no client.
    each = BYTES_PER_NUMBER if context.client.is_background else BYTES_PER_NUMBER_OF_RESPONSE
    context.reservation.grow(vectors * model.engine.facts.dimensions * each)


async def pool(
    model: Model, job: PoolJob, context: RequestContext, row_done: Callable[[int, PooledRow], None] | None = None
) -> Pooled:
    """Compute a job's tasks for each of its prompts.

    ``row_done(index, row)`` is called on the loop as soon as a prompt's row is computed. Raises
    ``InvalidRequestError``, ``OverloadedError`` and what ``compute_rows`` raises. Cancellation: at once;
    nothing of the job stays in the queue.
    """
    by_tokens = "token_embed" in job.tasks
    if not by_tokens and len(job.prompts) > 1 and not context.client.is_background:  # windows bound those of batches
        _reserve(model, context, len(job.prompts))  # first: a refusal costs as little as possible
    to_compute = rows_to_compute(model, job)
    finishes = [TASKS[name].finish for name in job.tasks]
    finished: dict[int, PooledRow] = {}

    def done(index: int, row: ComputedRow) -> None:
        finished[index] = tuple(finish(value) for finish, value in zip(finishes, row.values, strict=True))
        if row_done is not None:
            row_done(index, finished[index])

    work = estimated_work(model, job, to_compute, context)
    with model.admit(work, context.timings) as accounting:
        if by_tokens:
            _reserve(model, context, work.tokens)
        rows = await compute_rows(model, to_compute, accounting, row_done=done)
    return Pooled([finished[index] for index in range(len(rows))], [row.tokens for row in rows])

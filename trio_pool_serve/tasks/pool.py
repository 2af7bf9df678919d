"""Pooling jobs: tasks that compute outputs from single prompts."""

from collections.abc import Callable, Sequence
from functools import partial

from attrs import Factory, define, evolve, field, frozen

from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.errors import InvalidRequestError, JobField, listed, require_request
from trio_pool_serve.models.token_pooling import TokenPooling, pool_rows
from trio_pool_serve.prompts import ChunkedPrompt, Prompt, has_images
from trio_pool_serve.rendering.text.long_text import is_divided
from trio_pool_serve.tasks.fan_out import ComputedRow, Reserve, RowToCompute, compute_rows
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.types import (
    Activation,
    Classify,
    Embed,
    EmbedChunks,
    PooledValue,
    PoolingParams,
    PoolingTask,
    SparseVector,
    TokenClassify,
    TokenEmbed,
    Vectors,
)

MAX_TOKEN_NUMBERS = 32_000_000
"""Maximum numbers in a response with vectors per token: 128 MB, and several times that as JSON."""

MAX_CLUSTERED = 2048
"""Maximum vectors of a text that are clustered: their distances take 16 MiB, and clustering them takes 0.1 s on a core
of an AMD EPYC. A request is not counted as work meanwhile, and the time grows with the square of the number."""

BYTES_PER_NUMBER = 4

BYTES_PER_NUMBER_OF_RESPONSE = 16
"""4 in the vector, and about 12 in the JSON of the response, which is held until the client has read it."""

PooledRow = tuple[PooledValue, ...]
"""One prompt's outputs, in the order of the job's ``tasks``."""


@define(eq=False, kw_only=True)
class PoolJob:
    """Prompts and the tasks to compute for each of them: the form of a request of any dialect.

    One forward pass computes all ``tasks``. ``dimensions`` and ``normalize`` are for vectors, ``token_pooling`` (the
    factor, at least 1) for vectors of a document's tokens, ``max_active_dims`` (at least 1) for sparse vectors,
    ``activation`` for labels.
    """

    prompts: Sequence[Prompt]
    tasks: tuple[str, ...] = ("embed",)
    input_params: InputParams = Factory(InputParams)
    dimensions: int | None = None
    normalize: bool | None = None
    token_pooling: float | None = None
    max_active_dims: int | None = None
    activation: Activation = "probabilities"
    priority: int = 0
    document: ChunkedPrompt | None = field(
        init=False, default=Factory(lambda self: _document_of(self.prompts), takes_self=True)
    )
    """The document, the only prompt of a job for late chunking; else ``None``."""

    @property
    def vectors(self) -> int:
        """Number of vectors that the task ``embed`` returns."""
        document = self.document
        return len(self.prompts) if document is None else len(document.chunks)


def _document_of(prompts: Sequence[Prompt]) -> ChunkedPrompt | None:
    first = prompts[0] if len(prompts) == 1 else None
    return first if isinstance(first, ChunkedPrompt) else None


@frozen(eq=False)
class Task:
    """A pooling task: the params for the engine, and ``finish``, which postprocesses an output.

    ``needs`` is the task that the model must support. ``params`` raises ``InvalidRequestError`` if the model cannot
    compute the job. ``finish`` is called on the event loop for every prompt, so it must be fast.
    """

    needs: PoolingTask
    params: Callable[[Model, PoolJob], PoolingParams]
    finish: Callable[[PooledValue], PooledValue] = lambda value: value


@define(eq=False)
class Pooled:
    """The outputs of a job and the numbers of tokens, in the order of the prompts."""

    rows: list[PooledRow]
    tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.tokens)


def check_dimensions(model: Model, dimensions: int | None) -> None:
    """Raise ``InvalidRequestError`` unless the model's vectors can be truncated to ``dimensions``."""
    limit = model.dimensions
    require_request(
        dimensions is None or 1 <= dimensions <= limit,
        f"{{dimensions}} must be from 1 to {limit} for this model, not {dimensions}.",
        field="dimensions",
    )


def _embed_params(model: Model, job: PoolJob) -> Embed:
    check_dimensions(model, job.dimensions)
    if job.document is not None:
        spec = model.folder.spec
        instead = "reads texts by a chat template" if spec.uses_chat_template else f"pools by {spec.pooling}"
        require_request(
            spec.pools_chunks,
            f"Late chunking takes the mean of each chunk's token states, but this model {instead}.",
            field="chunks",
        )
        return EmbedChunks(dimensions=job.dimensions, normalize=job.normalize)
    return Embed(dimensions=job.dimensions, normalize=job.normalize)


def _token_embed_params(model: Model, job: PoolJob) -> TokenEmbed:
    check_dimensions(model, job.dimensions)
    normalize = job.normalize
    if token_pooling_of(model, job) is not None:  # clustering compares the vectors as the model makes them
        normalize = None if model.folder.spec.token_pooling else job.normalize or None
    return TokenEmbed(dimensions=job.dimensions, normalize=normalize)


def token_pooling_of(model: Model, job: PoolJob) -> TokenPooling | None:
    """Return how the vectors of a job's tokens are pooled, ``None`` if they are not.

    ``normalize`` of the job is about the pooled vectors. Raises ``InvalidRequestError`` if the model's cannot be.
    """
    own, factor = model.folder.spec.token_pooling, job.token_pooling
    if factor is not None:
        require_request(
            "token_embed" in job.tasks and model.folder.spec.scoring == "late_interaction",
            "{token_pooling} is only for token_embed of late-interaction models.",
            field="token_pooling",
        )
        if own is not None:
            raise InvalidRequestError(
                f"Leave out `{{token_pooling}}`: this model's files already pool tokens, by the factor {own.factor:g}.",
                field="token_pooling",
            )
        pooling = TokenPooling(factor=factor, normalizes=job.normalize is not False)
    elif own is not None and "token_embed" in job.tasks:
        pooling = evolve(own, normalizes=own.normalizes or job.normalize is True)
    else:
        return None
    return pooling if pooling.applies_to(job.input_params.effective_input_type) else None


async def pooled_tokens(
    model: Model,
    vectors: PooledValue,
    pooling: TokenPooling,
    finish: Callable[[Vectors], Vectors] = lambda pooled: pooled,
) -> Vectors:
    """Return what ``finish`` makes of the pooled vectors of one text; both run in a thread.

    Raises ``InvalidRequestError`` for more vectors than can be clustered. Cancellation: at once.
    """
    assert not isinstance(vectors, SparseVector)  # noqa: S101  (of another task)
    require_request(
        len(vectors) <= MAX_CLUSTERED,
        f"An input has {len(vectors)} token vectors; token_pooling can pool up to {MAX_CLUSTERED}.",
        field="prompts",
    )
    return await model.renderer.offload.run(
        "cluster", lambda: finish(pool_rows(vectors, pooling)), abandon_on_cancel=True
    )


def _sparse_params(model: Model, job: PoolJob) -> PoolingParams:
    params = model.folder.spec.sparse_params(job.input_params.effective_input_type)
    return params if job.max_active_dims is None else evolve(params, max_active_dims=job.max_active_dims)


TASKS: dict[str, Task] = {
    "embed": Task("embed", _embed_params),
    "token_embed": Task("token_embed", _token_embed_params),
    "sparse_embed": Task("sparse_embed", _sparse_params),
    "classify": Task("classify", lambda _, job: Classify(job.activation)),
    "token_classify": Task("token_classify", lambda _, job: TokenClassify(job.activation)),
}
"""The tasks of single prompts. Scoring, which takes two, is in ``tasks.score``."""


def task_named(name: str) -> Task:
    """Return a task. Raises ``InvalidRequestError`` for an unknown name."""
    if name not in TASKS:
        raise InvalidRequestError(f"{{tasks}} must be {listed([*map(repr, TASKS)])}, not {name!r}.", field="tasks")
    return TASKS[name]


def rows_to_compute(model: Model, job: PoolJob) -> list[RowToCompute]:
    """Return a job's prompts with their params. Raises ``InvalidRequestError`` if the model cannot compute them."""
    tasks = [task_named(name) for name in job.tasks]
    for task in tasks:
        model.require(task.needs)
    params = tuple([task.params(model, job) for task in tasks])
    rendering = model.rendering_params(job.input_params)
    is_text = job.tasks == ("embed",) and job.document is None
    in_windows = is_text and is_divided(model.long_text, rendering.truncate_to)
    return [RowToCompute(prompt, rendering, params, in_windows) for prompt in job.prompts]


def with_few_numbers(reserve: Reserve, dimensions: int, field: JobField) -> Reserve:
    """Return ``reserve`` for at most ``MAX_TOKEN_NUMBERS`` numbers in all: else it raises ``InvalidRequestError``."""
    total = 0

    def reserve_few(vectors: int) -> None:
        nonlocal total
        total += vectors
        require_request(
            total * dimensions <= MAX_TOKEN_NUMBERS,
            f"The inputs have {total} token vectors of {dimensions} numbers or more; the limit is "
            f"{MAX_TOKEN_NUMBERS} numbers. Send fewer inputs at a time.",
            field=field,
        )
        reserve(vectors)

    return reserve_few


def estimated_work(model: Model, job: PoolJob, rows: Sequence[RowToCompute], context: RequestContext) -> EstimatedWork:
    """Return a job's work for the engine, with its tokens estimated, not counted."""
    estimate = sum(map(model.renderer.estimated_tokens, job.prompts)) + job.input_params.estimated_tokens(len(rows))
    if not any(row.in_windows for row in rows):
        estimate = min(estimate, len(rows) * model.renderer.max_model_len)
    return context.work(estimate, len(rows), priority=job.priority, has_images=any(map(has_images, job.prompts)))


def _reserve(model: Model, context: RequestContext, vectors: int) -> None:
    """Reserve memory for vectors before they are computed. Raises ``OverloadedError``."""
    # Responses to lines of batches are not held for a client.
    each = BYTES_PER_NUMBER if context.client.is_background else BYTES_PER_NUMBER_OF_RESPONSE
    context.reservation.grow(vectors * model.dimensions * each)


async def pool(
    model: Model, job: PoolJob, context: RequestContext, row_done: Callable[[int, PooledRow], None] = lambda *_: None
) -> Pooled:
    """Compute a job's tasks for each of its prompts.

    ``row_done(index, row)`` is called on the event loop as soon as a prompt's row is computed. Raises
    ``InvalidRequestError``, ``OverloadedError``, and as ``compute_rows``. Cancellation: at once; its rows leave the
    queue.
    """
    by_tokens = "token_embed" in job.tasks
    # Batches are bounded by their windows.
    if not by_tokens and not context.client.is_background and (vectors := job.vectors) > 1:
        _reserve(model, context, vectors)  # first, so that a refusal is cheap
    to_compute, pooling = rows_to_compute(model, job), token_pooling_of(model, job)
    finishes = [TASKS[name].finish for name in job.tasks]
    finished: dict[int, PooledRow] = {}

    def done(index: int, row: ComputedRow) -> None:
        finished[index] = tuple([finish(value) for finish, value in zip(finishes, row.values, strict=True)])
        row_done(index, finished[index])

    work = estimated_work(model, job, to_compute, context)
    reserve = with_few_numbers(partial(_reserve, model, context), model.dimensions, "prompts") if by_tokens else None
    with model.admit(work) as admitted:
        rows = await compute_rows(
            model, to_compute, admitted, context.timings, None if pooling else done, reserve=reserve
        )
    if pooling is not None:
        place = job.tasks.index("token_embed")
        for index, row in enumerate(rows):
            values = list(row.values)
            values[place] = await pooled_tokens(model, values[place], pooling)
            done(index, row._replace(values=tuple(values)))
    return Pooled([finished[index] for index in range(len(rows))], [row.tokens for row in rows])

"""``/pooling``: any of a model's tasks, or several from one forward pass; and ``/classify``: texts to labels."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.api.dialects.openai import EMBEDDINGS_FIELD_NAMES, Chunk, EmbeddingsRequest
from trio_pool_serve.api.fields.embedding_responses import ListResponse, encode_bytes, encode_list
from trio_pool_serve.api.fields.encodings import nbytes_of, row_json
from trio_pool_serve.api.fields.field_values import (
    MaxActiveDims,
    TokenPoolingFactor,
    refuse_given,
    refused,
    require_given,
    the_same,
    wants_logits,
)
from trio_pool_serve.api.fields.input_fields import INPUT_FIELD_NAMES, InputFields, with_input_type
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.routes.models import TASK_PREFERENCE
from trio_pool_serve.errors import (
    InvalidRequestError,
    JobField,
    TaskNotSupportedError,
    listed,
    require_request,
)
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.tasks.pool import Pooled, PooledRow, PoolJob, pool, task_named
from trio_pool_serve.types import PooledValue, PoolingTask, SparseVector, Vectors

T = TypeVar("T")

PerTask: TypeAlias = T | Mapping[str, T]
"""The one task's value, or values by task if the request has ``tasks``."""


@frozen(kw_only=True)
class PoolingItem:
    """The values of one text.

    ``data`` is an array of numbers for the text, such an array for each of its tokens, base64 of either, or an array of
    ``{"index", "value"}``. ``shape`` is present if base64 holds an array for each token.
    """

    index: int
    data: PerTask[msgspec.Raw]
    shape: PerTask[list[int]] | msgspec.UnsetType = msgspec.UNSET
    object: Literal["pooling"] = "pooling"


@frozen(kw_only=True)
class PoolingResponse(ListResponse[PoolingItem]):
    """The response of ``/pooling``."""


def encode_pooled(call: "Call[PoolingRequest, PoolJob]", pooled: Pooled, tasks: Sequence[str]) -> HttpResponse:
    """Return the response: JSON, or the bytes of one task's arrays one after the other.

    ``tasks`` are the tasks of the rows; the values are given by task if the request has ``tasks``.
    """
    encoding, by_task, tokens = call.wire.encoding, call.wire.tasks is not None, pooled.prompt_tokens
    if encoding.format in ("bytes", "bytes_only"):
        arrays: list[Vectors] = [array for (array,) in pooled.rows]  # type: ignore[misc]
        return encode_bytes(call, "pooling-", arrays, encoding, tokens=tokens)

    def per_task(row: PooledRow, of: Callable[[PooledValue], T]) -> PerTask[T]:
        return dict(zip(tasks, map(of, row), strict=True)) if by_task else of(row[0])

    def item(index: int, row: PooledRow) -> PoolingItem:
        data = per_task(row, encoding.json)
        is_flat = encoding.format != "base64" or all(len(_shape(value)) == 1 for value in row)
        return PoolingItem(index=index, data=data, shape=msgspec.UNSET if is_flat else per_task(row, _shape))

    return encode_list(call, "pooling-", PoolingResponse, map(item, count(), pooled.rows), tokens=tokens)


def _shape(value: PooledValue) -> list[int]:
    return [len(value.indices)] if isinstance(value, SparseVector) else list(value.shape)


ELSEWHERE = "only /v1/embeddings has it"

VECTOR_TASKS = frozenset({"embed", "token_embed"})
LABEL_TASKS = frozenset({"classify", "token_classify"})


@frozen(kw_only=True)
class PoolingRequest(EmbeddingsRequest):
    """The body of ``/pooling``. Every optional field may be null.

    ``tasks`` instead of ``task`` asks for several at once. ``input_type`` is the role of the texts in a search:
    ``query``, ``document``. ``token_pooling`` is for token_embed, ``max_active_dims`` for sparse_embed: the names of
    sentence-transformers. ``use_activation`` applies to labels, or to vectors if there are no labels; ``activation``
    is its old name.
    """

    NORMALIZE_NAMES = ("normalize",)  # the tasks decide which values use_activation changes
    OTHER_TYPES = ("application/octet-stream",)
    task: str | None = None
    tasks: list[str] | None = None
    input_type: str | None = None
    activation: bool | None = None
    token_pooling: TokenPoolingFactor | None = None
    max_active_dims: MaxActiveDims | None = None
    stream: bool | None = refused(ELSEWHERE, [False])
    late_chunking: bool | None = refused(ELSEWHERE, [False])
    chunks: list[Chunk] | None = refused(ELSEWHERE)
    data: Any = refused("there are no IO processors")

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request; no tasks stand for the model's main task. Raises as the base class."""
        return evolve(
            super().job(max_inputs),
            tasks=self._tasks(),
            token_pooling=self.token_pooling,
            max_active_dims=self.max_active_dims,
        )

    def with_activation(self, job: PoolJob) -> PoolJob:
        """Return the job with ``use_activation`` applied to the values of its tasks. Raises ``InvalidRequestError``."""
        if "sparse_embed" not in job.tasks:
            refuse_given(self, ("max_active_dims",), "is for sparse_embed")
        if VECTOR_TASKS.isdisjoint(job.tasks):
            refuse_given(self, ("normalize", "dimensions"), "has no meaning for these tasks")
        if not LABEL_TASKS.isdisjoint(job.tasks):
            return evolve(job, activation="raw" if wants_logits(self) else "probabilities")
        return evolve(job, normalize=the_same(self, "normalize", "use_activation", "activation"))

    def _tasks(self) -> tuple[str, ...]:
        if self.tasks is None:
            return () if self.task is None else (self.task,)
        require_request(self.task is None, "Send `task` or `tasks`, not both.", param="tasks")
        require_given(self.tasks, at="tasks")
        tasks = tuple(dict.fromkeys(self.tasks))
        require_request(
            len(tasks) == 1 or self.encoding.format not in ("bytes", "bytes_only"),
            "must be 'float' or 'base64' with several tasks.",
            at="encoding_format",
        )
        return tasks


async def respond_pooling(call: Call[PoolingRequest, PoolJob]) -> HttpResponse:
    """Pool. Errors: as ``pool``. Cancellation: at once."""
    model = call.model
    job = with_input_type(call.job, call.wire.input_type, model)
    named: JobField | None = "tasks" if job.tasks else None
    job = evolve(job, tasks=job.tasks or (main_task(model.folder),))
    for name in job.tasks:
        model.require(task_named(name).needs, field=named)
    job = call.wire.with_activation(job)
    if job.normalize is None and model.folder.spec.normalizes:
        job = evolve(job, normalize=True)  # vLLM normalises the vectors of tokens too
    for name in job.tasks:
        _refuse_unencodable(call, job, task_named(name).needs)
    pooled = await pool(model, job, call.context)
    nbytes = sum(nbytes_of(value) for row in pooled.rows for value in row)
    encode = partial(encode_pooled, call, pooled, job.tasks)
    return await call.encode(encode, rows=len(pooled.rows), nbytes=nbytes)


def main_task(folder: AnyModelFolder) -> PoolingTask:
    """Return the task that a model does by default: ``--task``, if it can. Raises ``TaskNotSupportedError``."""
    able, chosen = folder.spec.tasks, folder.task
    for task in (*([chosen] if chosen else []), *TASK_PREFERENCE):
        if task in able and task != "score":
            return task
    raise TaskNotSupportedError(f"This route cannot use the model, which supports {listed(sorted(able), 'and')}.")


def _refuse_unencodable(call: Call[PoolingRequest, PoolJob], job: PoolJob, task: PoolingTask) -> None:
    """Raise ``InvalidRequestError`` if the values cannot be encoded as requested, before they are computed."""
    encoding = call.wire.encoding
    if task == "sparse_embed":
        # Of several tasks, the encoding is for the others.
        if len(job.tasks) == 1 and (encoding.format, encoding.dtype) != ("float", "float32"):
            param = "embed_dtype" if encoding.format == "float" else "encoding_format"
            raise InvalidRequestError(f"Leave out `{param}`: sparse_embed returns JSON numbers.", param=param)
        return
    labels = call.model.folder.spec.labels
    dimensions = len(labels) if task in LABEL_TASKS else job.dimensions or call.model.dimensions
    encoding.refuse_unencodable(rows=len(job.prompts), dimensions=dimensions)


@frozen(kw_only=True)
class ClassifyRequest(InputFields):
    """The body of ``/classify``: ``input`` or ``messages``. Every optional field may be null.

    ``activation`` is an old name of ``use_activation``, ``raw_scores`` its opposite; ``task`` is as on ``/pooling``.
    """

    task: Literal["classify"] | None = None
    activation: bool | None = None
    raw_scores: bool | None = None
    labels: Any = refused("the labels are the model's own", [[]])

    def job(self, max_inputs: int) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        return PoolJob(
            prompts=self.prompts(max_inputs),
            tasks=("classify",),
            input_params=self.input_params,
            activation="raw" if wants_logits(self) else "probabilities",
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class ClassifyItem:
    """One text's class: the label with the greatest number, and the numbers of all labels."""

    index: int
    label: str
    probs: msgspec.Raw
    num_classes: int
    object: Literal["classify"] = "classify"


@frozen(kw_only=True)
class ClassifyResponse(ListResponse[ClassifyItem]):
    """The response of ``/classify``."""


async def respond_classify(call: Call[ClassifyRequest, PoolJob]) -> HttpResponse:
    """Classify. Errors: as ``pool``. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.context)
    rows: list[Vectors] = [row for (row,) in pooled.rows]  # type: ignore[misc]

    def item(index: int, row: Vectors) -> ClassifyItem:
        label = call.model.label(int(np.argmax(row)))
        return ClassifyItem(index=index, label=label, probs=msgspec.Raw(row_json(row, "float32")), num_classes=len(row))

    items = map(item, count(), rows)  # labels and numbers become JSON as the response is encoded
    encode = partial(encode_list, call, "classify-", ClassifyResponse, items, tokens=pooled.prompt_tokens)
    return await call.encode(encode, rows=len(rows), nbytes=sum(row.nbytes for row in rows))


POOLING_ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint(
        paths=("/pooling",),
        wire=PoolingRequest,
        respond=respond_pooling,
        field_names={**EMBEDDINGS_FIELD_NAMES, "tasks": ("tasks", "task")},
        response=PoolingResponse,
        summary="Do a task of the model for each text: vectors, labels, or either for each token.",
        example={"input": ["A nursery owns its tasks.", "Every task has a parent."]},
    ),
    Endpoint(
        paths=("/classify", "/v1/classify"),
        wire=ClassifyRequest,
        respond=respond_classify,
        field_names=INPUT_FIELD_NAMES,
        response=ClassifyResponse,
        summary="Sort texts into the model's classes.",
        example={"input": ["I like structured concurrency.", "I have lost a task."]},
    ),
)

"""``/classify`` of vLLM: texts to labels."""

from typing import Any, Literal

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve.api.fields.embedding_responses import ListResponse, encode_list
from trio_pool_serve.api.fields.encodings import row_json
from trio_pool_serve.api.fields.given_fields import refused, wants_logits
from trio_pool_serve.api.fields.input_fields import INPUT_FIELD_NAMES, InputFields
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import pool
from trio_pool_serve.types import Vectors


@frozen(kw_only=True)
class ClassifyRequest(InputFields):
    """The body of ``/classify``: ``input`` or ``messages``. Every optional field may be null.

    ``activation`` is an old name of ``use_activation``, ``raw_scores`` its opposite; ``task`` is as on ``/pooling``.
    """

    task: Literal["classify"] | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    raw_scores: bool | None = None
    labels: Any = refused("the labels are the model's own", [[]])

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        return PoolJob(
            prompts=self.prompts(network),
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
    """Classify. Raises what ``pool`` raises. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.context)
    rows: list[Vectors] = [row for (row,) in pooled.rows]  # type: ignore[misc]

    def item(index: int, row: Vectors) -> ClassifyItem:
        label = call.model.label(int(np.argmax(row)))
        return ClassifyItem(index=index, label=label, probs=msgspec.Raw(row_json(row, "float32")), num_classes=len(row))

    def encode() -> HttpResponse:
        items = [item(index, row) for index, row in enumerate(rows)]
        return encode_list(call, "classify-", ClassifyResponse, items, tokens=pooled.prompt_tokens)

    return await call.encode(encode, rows=len(rows), nbytes=sum(row.nbytes for row in rows))


CLASSIFY: Endpoint[ClassifyRequest, PoolJob] = Endpoint(
    paths=("/classify", "/v1/classify"),
    wire=ClassifyRequest,
    respond=respond_classify,
    field_names=INPUT_FIELD_NAMES,
    response=ClassifyResponse,
    summary="Sort texts into the model's classes.",
    example={"input": ["I like structured concurrency.", "I have lost a task."]},
)

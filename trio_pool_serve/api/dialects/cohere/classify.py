"""Cohere's ``/v1/classify``, with the labels that the model itself has learnt."""

from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve.api.dialects.cohere.wire import Meta, Truncate, meta_of, reading_of
from trio_pool_serve.api.fields.encodings import row_json
from trio_pool_serve.api.fields.numbers import Priority
from trio_pool_serve.api.fields.prompts import require_few
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import Pooled, pool
from trio_pool_serve.types import Vectors

LIKELY = 0.5


@frozen(kw_only=True)
class ClassifyRequest:
    """The body of ``/v1/classify``."""

    inputs: list[str]
    model: str | None = None
    examples: list[Any] | None = None
    preset: str | None = None
    truncate: Truncate | None = None
    priority: Priority | None = None

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return what is asked, in the task's terms. Raises ``InvalidRequestError``."""
        for name, given in (("examples", self.examples), ("preset", self.preset)):
            if given:
                raise InvalidRequestError(
                    f"{name} cannot be taken: models here have learnt their labels already.", param=name
                )
        if not self.inputs:
            raise EmptyInputError("inputs is empty.", param="inputs")
        require_few(self.inputs, network, param="inputs")
        return PoolJob(
            prompts=[TextPrompt(text) for text in self.inputs],
            tasks=("classify",),
            reading=reading_of(self.truncate),
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class LabelConfidence:
    """How sure the model is of a label."""

    confidence: msgspec.Raw


@frozen(kw_only=True)
class Classification:
    """What a text is.

    ``predictions`` and ``confidences`` are of the surest label, as ``prediction`` and ``confidence`` are; where labels
    do not exclude each other, of all that are likelier than not, and there is no single one.
    """

    id: str
    input: str
    prediction: str | None
    predictions: list[str]
    confidence: msgspec.Raw | None
    confidences: list[msgspec.Raw]
    labels: dict[str, LabelConfidence]
    classification_type: Literal["single-label", "multi-label"]


@frozen(kw_only=True)
class ClassifyResponse:
    """A classification per input, in order."""

    id: str
    classifications: list[Classification]
    meta: Meta


async def answer_classify(call: Call[ClassifyRequest, PoolJob]) -> Answer:
    """Classify. Raises what ``pool`` raises. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.timings)
    labels = len(call.model.folder.spec.labels)
    return await call.encode(
        partial(_encode, call, pooled), rows=len(pooled.rows) * labels, nbytes=4 * len(pooled.rows) * labels
    )


def _encode(call: Call[ClassifyRequest, PoolJob], pooled: Pooled) -> Answer:
    spec = call.model.folder.spec
    classifications = [
        _classification(f"{call.request_id}-{index}", text, values, spec.labels, exclusive=not spec.multi_label)  # type: ignore[arg-type]
        for index, (text, (values,)) in enumerate(zip(call.wire.inputs, pooled.rows, strict=True))
    ]
    meta = meta_of("1", classifications=len(classifications))
    return Answer(msgspec.json.encode(ClassifyResponse(id=call.request_id, classifications=classifications, meta=meta)))


def _classification(
    item_id: str, text: str, values: Vectors, labels: tuple[str, ...], *, exclusive: bool
) -> Classification:
    confidences = [msgspec.Raw(number) for number in row_json(values, "float32")[1:-1].split(b",")]
    best = int(values.argmax())
    told = [best] if exclusive else np.flatnonzero(values >= LIKELY).tolist()
    return Classification(
        id=item_id,
        input=text,
        prediction=labels[best] if exclusive else None,
        predictions=[labels[index] for index in told],
        confidence=confidences[best] if exclusive else None,
        confidences=[confidences[index] for index in told],
        labels={
            label: LabelConfidence(confidence=confidence) for label, confidence in zip(labels, confidences, strict=True)
        },
        classification_type="single-label" if exclusive else "multi-label",
    )


CLASSIFY_ENDPOINT = Endpoint(
    paths=("/v1/classify",),
    marks=frozenset({"inputs"}),
    wire=ClassifyRequest,
    read=ClassifyRequest.job,
    answer=answer_classify,
    response=ClassifyResponse,
    summary="Classify texts by the model's own labels.",
    example={"inputs": ["A nursery owns its tasks."]},
)

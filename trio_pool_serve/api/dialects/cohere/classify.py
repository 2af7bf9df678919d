"""Cohere's ``/v1/classify``, with the model's own labels."""

from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve.api.dialects.cohere.meta import Meta, Truncate, input_params_of, meta_of
from trio_pool_serve.api.fields.encodings import number_items
from trio_pool_serve.api.fields.given_fields import refused
from trio_pool_serve.api.fields.numbers import Priority, require_some
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.tasks.job import PoolJob
from trio_pool_serve.tasks.pool import Pooled, pool
from trio_pool_serve.types import Vectors

LIKELY = 0.5
"""Labels that do not exclude each other are predicted from this probability on."""


@frozen(kw_only=True)
class ClassifyRequest:
    """The body of ``/v1/classify``."""

    inputs: list[str]
    model: str | None = None
    examples: list[Any] | None = refused("the labels are the model's own", [[]])
    preset: str | None = refused("the labels are the model's own", [""])
    truncate: Truncate | None = None
    priority: Priority | None = None

    def job(self, network: NetworkConfig) -> PoolJob:
        """Return the job of the request. Raises ``InvalidRequestError``."""
        require_some(self.inputs, network, param="inputs")
        return PoolJob(
            prompts=[TextPrompt(text) for text in self.inputs],
            tasks=("classify",),
            input_params=input_params_of(self.truncate),
            priority=self.priority or 0,
        )


@frozen(kw_only=True)
class LabelConfidence:
    """The probability of a label."""

    confidence: msgspec.Raw


@frozen(kw_only=True)
class Classification:
    """The labels of a text.

    ``predictions`` and ``confidences`` have the most probable label, as ``prediction`` and ``confidence`` do; where
    labels do not exclude each other, all that are ``LIKELY``, and there is no single one.
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


async def respond_classify(call: Call[ClassifyRequest, PoolJob]) -> HttpResponse:
    """Classify. Raises what ``pool`` raises. Cancellation: at once."""
    pooled = await pool(call.model, call.job, call.context)
    labels = len(call.model.folder.spec.labels)
    return await call.encode(
        partial(_encode, call, pooled), rows=len(pooled.rows) * labels, nbytes=4 * len(pooled.rows) * labels
    )


def _encode(call: Call[ClassifyRequest, PoolJob], pooled: Pooled) -> HttpResponse:
    spec = call.model.folder.spec
    classifications = [
        _classification(f"{call.request_id}-{index}", text, values, spec.labels, exclusive=not spec.multi_label)  # type: ignore[arg-type]
        for index, (text, (values,)) in enumerate(zip(call.wire.inputs, pooled.rows, strict=True))
    ]
    meta = meta_of("1", classifications=len(classifications))
    return HttpResponse.json(ClassifyResponse(id=call.request_id, classifications=classifications, meta=meta))


def _classification(
    item_id: str, text: str, values: Vectors, labels: tuple[str, ...], *, exclusive: bool
) -> Classification:
    confidences = list(map(msgspec.Raw, number_items(values)))
    best = int(values.argmax())
    predicted = [best] if exclusive else np.flatnonzero(values >= LIKELY).tolist()
    return Classification(
        id=item_id,
        input=text,
        prediction=labels[best] if exclusive else None,
        predictions=[labels[index] for index in predicted],
        confidence=confidences[best] if exclusive else None,
        confidences=[confidences[index] for index in predicted],
        labels={
            label: LabelConfidence(confidence=confidence) for label, confidence in zip(labels, confidences, strict=True)
        },
        classification_type="single-label" if exclusive else "multi-label",
    )


CLASSIFY_ENDPOINT = Endpoint(
    paths=("/v1/classify",),
    discriminators=frozenset({"inputs"}),
    wire=ClassifyRequest,
    respond=respond_classify,
    field_names={"prompts": "inputs", "truncate_to": "truncate"},
    response=ClassifyResponse,
    summary="Classify texts by the model's own labels.",
    example={"inputs": ["A nursery owns its tasks."]},
)

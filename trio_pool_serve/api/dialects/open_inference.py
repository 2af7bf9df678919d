"""The Open Inference Protocol (version 2 of KServe's), over HTTP with JSON: texts in, tensors out.

A model with vectors takes one input of texts, a reranker two: its query, and its documents.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from attrs import frozen

from trio_pool_serve.api.fields.encodings import row_json
from trio_pool_serve.api.fields.field_values import WireRequest, require_some
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint, string_error_body
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import InvalidRequestError, listed, require_request
from trio_pool_serve.models.model_kind import ModelSpec
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.pool import PoolJob, pool
from trio_pool_serve.tasks.score import ScoreJob, score
from trio_pool_serve.types import Vectors

OutputName: TypeAlias = Literal["embedding", "probabilities", "score"]

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1, description="Of one dimension.")]

MAX_SHAPE = 8
"""Maximum number of dimensions."""


@frozen(kw_only=True)
class InputTensor:
    """Texts as a tensor of strings: flat, or in lists."""

    name: str
    shape: list[Length]
    datatype: Literal["BYTES"]
    data: list[str | list[str]]

    def texts(self, max_inputs: int) -> list[str]:
        """Return the texts, in order. Raises ``InvalidRequestError`` if the shape is of another number."""
        flat = [text for item in self.data for text in (item if isinstance(item, list) else [item])]
        require_some(flat, max_inputs, param="inputs")
        require_request(
            len(self.shape) <= MAX_SHAPE and math.prod(self.shape) == len(flat),
            f"inputs: the shape of `{self.name}` is {self.shape[:MAX_SHAPE]}, but its data has {len(flat)} texts.",
            param="inputs",
        )
        return flat


@frozen(kw_only=True)
class Parameters:
    """Parameters of a request that this server knows: whether longer texts are truncated."""

    truncate: bool | None = None


@frozen(kw_only=True)
class OutputRequest:
    """An output that the response must have."""

    name: OutputName


@frozen(kw_only=True)
class InferRequest(WireRequest):
    """The body of ``/v2/models/NAME/infer``."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[OutputRequest] | None = None
    parameters: Parameters | None = None

    def job(self, max_inputs: int) -> Mapping[str, list[str]]:
        """Return the texts of each input by its name. Raises ``InvalidRequestError``."""
        require_some(self.inputs, max_inputs, param="inputs")
        texts = {tensor.name: tensor.texts(max_inputs) for tensor in self.inputs}
        require_request(len(texts) == len(self.inputs), "has two tensors of the same name.", at="inputs")
        return texts

    @property
    def input_params(self) -> InputParams:
        """How the texts are truncated."""
        truncate = None if self.parameters is None else self.parameters.truncate
        return InputParams(truncate_to=-1 if truncate else None, refuses_longer=truncate is False)


@frozen(kw_only=True)
class OutputTensor:
    """Numbers in the order of the inputs, the last dimension fastest."""

    name: OutputName
    shape: list[int]
    data: msgspec.Raw
    datatype: Literal["FP32"] = "FP32"


@frozen(kw_only=True)
class InferResponse:
    """One tensor."""

    model_name: str
    id: str
    outputs: list[OutputTensor]


def tensors_of(spec: ModelSpec) -> tuple[Sequence[str], OutputName]:
    """Return the names of a model's inputs, and of its output. Raises ``InvalidRequestError`` if it has none."""
    if spec.scoring == "pairs":
        return ("query", "documents"), "score"
    if "embed" in spec.tasks:
        return ("text",), "embedding"
    if "classify" in spec.tasks:
        return ("text",), "probabilities"
    raise InvalidRequestError(
        f"This route cannot use the model, which supports {listed(sorted(spec.tasks), 'and')}.",
        param="inputs",
    )


async def respond(call: Call[InferRequest, Mapping[str, list[str]]]) -> HttpResponse:
    """Compute the output of the model. Errors: as ``pool`` and ``score``. Cancellation: at once."""
    wire, texts = call.wire, call.job
    names, output = tensors_of(call.model.folder.spec)
    require_request(
        all(wanted.name == output for wanted in wire.outputs or ()),
        f"must be {output}, this model's only output.",
        at="outputs",
    )
    if len(names) == 1 == len(texts):
        names = list(texts)  # by any name
    require_request(
        set(names) == set(texts), f"must be named {' and '.join(names)}, not {', '.join(texts)}.", at="inputs"
    )
    if output == "score":
        queries, documents = (texts[name] for name in names)
        scored = ScoreJob(queries=queries, documents=documents, input_params=wire.input_params)
        rows: list[Vectors] = [(await score(call.model, scored, call.context)).values]
    else:
        job = PoolJob(
            prompts=list(map(TextPrompt, texts[names[0]])),
            tasks=("embed" if output == "embedding" else "classify",),
            input_params=wire.input_params,
        )
        rows = [row for (row,) in (await pool(call.model, job, call.context)).rows]  # type: ignore[misc]

    def encode() -> HttpResponse:
        values = rows[0] if output == "score" else np.stack(rows)
        tensor = OutputTensor(
            name=output, shape=list(values.shape), data=msgspec.Raw(row_json(values.ravel(), "float32"))
        )
        return HttpResponse.json(
            InferResponse(model_name=call.model.name, id=wire.id or call.request_id, outputs=[tensor])
        )

    return await call.encode(encode, rows=len(rows), nbytes=sum(row.nbytes for row in rows))


EXAMPLE = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["A nursery owns its tasks."]}

OPEN_INFERENCE = Dialect(
    name="open_inference",
    error_body=string_error_body,
    endpoints=(
        Endpoint(
            paths=("/v2/models/{name}/infer",),
            wire=InferRequest,
            respond=respond,
            field_names={"prompts": "inputs", "documents": "inputs", "queries": "inputs", "truncate_to": "parameters"},
            response=InferResponse,
            summary="Compute a tensor from texts: vectors, probabilities of labels, or scores.",
            example={"inputs": [EXAMPLE]},
        ),
    ),
)

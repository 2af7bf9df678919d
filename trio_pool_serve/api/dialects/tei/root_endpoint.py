"""``POST /``: one route for every kind of model, chosen by the request's fields and the model's main task.

The hub's own clients post to a server's bare address, with options in ``parameters``.
"""

from typing import Any

import outcome
from attrs import evolve, fields, frozen

from trio_pool_serve.api.dialects.tei.pooling_endpoints import (
    NOT_DENSE,
    TEXTS,
    EmbedRequest,
    PredictRequest,
    TextOptions,
    respond_predict,
    respond_vectors,
)
from trio_pool_serve.api.dialects.tei.scoring_endpoints import (
    RerankRequest,
    SimilarityInputs,
    SimilarityRequest,
    respond_rerank,
    respond_similarity,
)
from trio_pool_serve.api.fields.field_values import (
    Dimensions,
    TokenId,
    TopK,
    TopN,
    WireRequest,
    refuse_given,
    refused,
    require_least,
)
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import (
    MissingFieldError,
    TaskNotSupportedError,
    listed,
    require_request,
)
from trio_pool_serve.tasks.pool import PoolJob
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.types import PoolingTask

MAIN_TASKS: tuple[PoolingTask, ...] = ("embed", "sparse_embed", "token_embed", "classify")
"""The first that a model can do is its main task; a model that can do none of them scores ``texts``."""


@frozen(kw_only=True)
class Parameters(TextOptions):
    """The options that the hub's clients send."""

    normalize: bool | None = None
    dimensions: Dimensions | None = None
    raw_scores: bool | None = None
    top_k: TopK | None = None
    function_to_apply: str | None = refused("the model's files choose the function; with raw_scores there is none")


@frozen(eq=False)
class InputsJob:
    """The job for an embedding model and the job for a classifier; each, or the error that prevents it."""

    vectors: outcome.Maybe[PoolJob]
    labels: outcome.Maybe[PoolJob]


@frozen(kw_only=True)
class RootRequest(WireRequest, Parameters):
    """The body of ``POST /``: a body for ``/embed``, ``/predict``, ``/similarity`` or ``/rerank``.

    Options beside ``inputs`` override options in ``parameters``.
    """

    inputs: str | list[str | TokenId | list[str | TokenId]] | SimilarityInputs | None = None
    query: str | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    top_n: TopN | None = None
    parameters: Parameters | None = None

    @property
    def options(self) -> Parameters:
        """The options: beside ``inputs``, or else in ``parameters``."""
        beside = {field.name: getattr(self, field.name) for field in fields(Parameters)}
        given = {name: value for name, value in beside.items() if value is not None}
        return evolve(self.parameters or Parameters(), **given)

    def job(self, max_inputs: int) -> InputsJob | ScoreJob:
        """Return the jobs of the request, one for each kind of model. Raises ``InvalidRequestError``."""
        options = self.options
        if self.texts is not None:
            refuse_given(self, ("inputs",), "cannot be sent with texts")
            refuse_given(options, ("normalize", "dimensions", "top_k"), "is not for rankings")
            if self.query is None:
                raise MissingFieldError("query")
            return RerankRequest(
                query=self.query,
                texts=self.texts,
                raw_scores=options.raw_scores,
                top_n=self.top_n,
                **_text_options(options),
            ).job(max_inputs)
        refuse_given(self, ("query", "return_text", "top_n"), "needs `texts`, which is missing")
        match self.inputs:
            case None:
                raise MissingFieldError("inputs", "texts")
            case SimilarityInputs() as inputs:
                refuse_given(options, ("normalize", "dimensions", "raw_scores", "top_k"), "is not for similarities")
                return SimilarityRequest(inputs=inputs, parameters=options).job(max_inputs)
            case inputs:
                given = inputs, options, max_inputs
                return InputsJob(outcome.capture(_vectors, *given), outcome.capture(_labels, *given))


def _text_options(options: Parameters) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(TextOptions)}


def _vectors(inputs: Any, options: Parameters, max_inputs: int) -> PoolJob:
    require_request(
        not any(isinstance(row, list) and str in map(type, row) for row in inputs),
        "has lists of texts; this model accepts texts and lists of token ids.",
        at="inputs",
    )
    refuse_given(options, ("raw_scores", "top_k"), "is for labels, but this model returns vectors")
    return EmbedRequest(
        inputs=inputs, normalize=options.normalize, dimensions=options.dimensions, **_text_options(options)
    ).job(max_inputs)


def _labels(inputs: Any, options: Parameters, max_inputs: int) -> PoolJob:
    refuse_given(options, ("normalize", "dimensions"), "is for vectors, but this model returns labels")
    require_least(options.top_k, least=1, param="top_k")
    return PredictRequest(inputs=inputs, raw_scores=options.raw_scores, **_text_options(options)).job(max_inputs)


async def respond_root(call: Call[RootRequest, Any]) -> HttpResponse:
    """Respond as the route for the request's fields and the model's main task does.

    Errors: as that route. Cancellation: at once.
    """
    job: InputsJob | ScoreJob = call.job
    if isinstance(job, ScoreJob):
        return await (respond_similarity if job.symmetric else respond_rerank)(call)
    able = call.model.folder.spec.tasks
    match next((task for task in MAIN_TASKS if task in able), None):
        case "embed":
            return await respond_vectors(evolve(call, job=job.vectors.unwrap()))
        case "sparse_embed" | "token_embed" as task:
            vectors = evolve(job.vectors.unwrap(), tasks=(task,), normalize=call.wire.options.normalize)
            if task == "sparse_embed":
                refuse_given(call.wire.options, ("normalize", "dimensions"), f"is for vectors: {NOT_DENSE}")
            return await respond_vectors(evolve(call, job=vectors))
        case "classify":
            return await respond_predict(
                evolve(call, job=job.labels.unwrap()),
                top_k=call.wire.options.top_k,
                in_list=True,  # the hub's clients take the first item of a list here, even for a single text
            )
    require_request("score" not in able, "This model ranks texts: send `query` and `texts`.", param="texts")
    raise TaskNotSupportedError(
        f"This route cannot use the model `{call.model.name}`, which supports {listed(sorted(able), 'and')}."
    )


ROOT: Endpoint[RootRequest, InputsJob | ScoreJob] = Endpoint(
    paths=("/",),
    wire=RootRequest,
    respond=respond_root,
    field_names={"prompts": ("texts", "inputs"), "truncate_to": "truncate"},
    summary="Do the model's main task: as /embed, /embed_sparse, /embed_all, /predict, /rerank or /similarity.",
    example={"inputs": TEXTS},
)

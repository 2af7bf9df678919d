"""``POST /``: one route for every kind of model, chosen by the request's fields and the model's main task.

The hub's own clients post to a server's bare address, with options in ``parameters``.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from attrs import evolve, fields, frozen

from trio_pool_serve.api.dialects.tei.pooling_endpoints import (
    NOT_DENSE,
    TEXTS,
    EmbedRequest,
    PredictJob,
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
from trio_pool_serve.api.fields.field_values import Dimensions, TokenId, TopK, TopN, refuse_given, refused
from trio_pool_serve.api.fields.ranking import require_top
from trio_pool_serve.api.http.endpoint import Call, Endpoint
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError, TaskNotSupportedError
from trio_pool_serve.tasks.pool import PoolJob
from trio_pool_serve.tasks.score import ScoreJob
from trio_pool_serve.types import PoolingTask

T = TypeVar("T")

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
    """The job for an embedding model and the job for a classifier, or the reasons why the inputs make none."""

    vectors: PoolJob | InvalidRequestError
    labels: PredictJob | InvalidRequestError


@frozen(kw_only=True)
class RootRequest(Parameters):
    """The body of ``POST /``: a body for ``/embed``, ``/predict``, ``/similarity`` or ``/rerank``.

    Options beside ``inputs`` override options in ``parameters``.
    """

    inputs: str | list[str | TokenId | list[str | TokenId]] | SimilarityInputs | None = None
    query: str | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    top_n: TopN | None = None
    parameters: Parameters | None = None
    model: str | None = None

    @property
    def options(self) -> Parameters:
        """The options: beside ``inputs``, or else in ``parameters``."""
        given = self.parameters or Parameters()
        names = [field.name for field in fields(Parameters)]
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return evolve(given, **chosen)

    def job(self, network: NetworkConfig) -> InputsJob | ScoreJob:
        """Return the jobs of the request, one for each kind of model. Raises ``InvalidRequestError``."""
        options = self.options
        if self.texts is not None:
            refuse_given(self, ("inputs",), "is given beside texts: give one of the two")
            refuse_given(options, ("normalize", "dimensions", "top_k"), "is not for texts that are ranked")
            if self.query is None:
                raise InvalidRequestError("texts are ranked by a query, which is missing.", param="query")
            ranked_by: dict[str, Any] = {"query": self.query, "raw_scores": options.raw_scores, "top_n": self.top_n}
            return RerankRequest(texts=self.texts, **ranked_by, **_text_options(options)).job(network)
        refuse_given(self, ("query", "return_text", "top_n"), "is for texts, which are missing")
        match self.inputs:
            case None:
                raise InvalidRequestError("The body needs one of these fields: inputs, texts.", param="inputs")
            case SimilarityInputs() as inputs:
                refuse_given(options, ("normalize", "dimensions", "raw_scores", "top_k"), "is not for similarities")
                return SimilarityRequest(inputs=inputs, parameters=options).job(network)
            case inputs:
                given = inputs, options, network
                return InputsJob(_job_or_error(_vectors, *given), _job_or_error(_labels, *given))


def _text_options(options: Parameters) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(TextOptions)}


def _job_or_error(make: Callable[[Any, Parameters, NetworkConfig], T], *arguments: Any) -> T | InvalidRequestError:
    try:
        return make(*arguments)
    except InvalidRequestError as error:
        return error


def _vectors(inputs: Any, options: Parameters, network: NetworkConfig) -> PoolJob:
    rows = [] if isinstance(inputs, str) else [row for row in inputs if isinstance(row, list)]
    if any(str in set(map(type, row)) for row in rows):
        raise InvalidRequestError("inputs has texts in lists of lists, where token ids are taken.", param="inputs")
    refuse_given(options, ("raw_scores", "top_k"), "is for labels, and this model makes vectors")
    request = EmbedRequest(
        inputs=inputs, normalize=options.normalize, dimensions=options.dimensions, **_text_options(options)
    )
    return request.dense(network)


def _labels(inputs: Any, options: Parameters, network: NetworkConfig) -> PredictJob:
    refuse_given(options, ("normalize", "dimensions"), "is for vectors, and this model makes labels")
    require_top(options.top_k, least=1, param="top_k")
    request = PredictRequest(inputs=inputs, raw_scores=options.raw_scores, **_text_options(options))
    job = request.job(network)
    # The hub's clients take the first item of a list here, even for a single text.
    return evolve(job, is_batch=job.is_batch or isinstance(inputs, str), top_k=options.top_k)


async def respond_root(call: Call[RootRequest, Any]) -> HttpResponse:
    """Respond as the route for the request's fields and the model's main task does.

    Raises what that route raises. Cancellation: at once.
    """
    job: InputsJob | ScoreJob = call.job
    if isinstance(job, ScoreJob):
        return await (respond_similarity if job.symmetric else respond_rerank)(call)
    able = call.model.folder.spec.tasks
    match next((task for task in MAIN_TASKS if task in able), None):
        case "embed":
            return await respond_vectors(evolve(call, job=_job_or_raise(job.vectors)))
        case "sparse_embed" | "token_embed" as task:
            vectors: PoolJob = _job_or_raise(job.vectors)
            if task == "sparse_embed":
                refuse_given(call.wire.options, ("normalize", "dimensions"), f"is for vectors: {NOT_DENSE}")
            vectors = evolve(vectors, tasks=(task,), normalize=call.wire.options.normalize)
            return await respond_vectors(evolve(call, job=vectors))
        case "classify":
            return await respond_predict(evolve(call, job=_job_or_raise(job.labels)))
    if "score" in able:
        raise InvalidRequestError("This model ranks texts by a query: send query and texts.", param="texts")
    raise TaskNotSupportedError(f"The model {call.model.name!r} can only {', '.join(sorted(able))}; not on this route.")


def _job_or_raise(job: Any) -> Any:
    if isinstance(job, InvalidRequestError):
        raise job
    return job


ROOT: Endpoint[RootRequest, InputsJob | ScoreJob] = Endpoint(
    paths=("/",),
    wire=RootRequest,
    respond=respond_root,
    field_names={"prompts": ("texts", "inputs"), "truncate_to": "truncate"},
    summary="Do the model's main task: as /embed, /embed_sparse, /embed_all, /predict, /rerank or /similarity.",
    example={"inputs": TEXTS},
)

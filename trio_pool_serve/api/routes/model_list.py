"""``/v1/models``: the models of the server, for OpenAI's and Cohere's clients."""

import msgspec
from attrs import frozen

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.service import Service
from trio_pool_serve.serving.served_model import ModelState, ServedModel
from trio_pool_serve.types import PoolingTask

MODELS_PATH, MODEL_PATH = "/v1/models", "/v1/models/{name}"


@frozen(kw_only=True)
class ModelCard:
    """One entry of ``/v1/models``; ``tasks`` are those of this server, ``name`` is Cohere's name for the id.

    ``created`` and ``last_used`` are in seconds since the epoch. What is not known before a model has been loaded for
    the first time is absent then, and memory where it is not measured: see ``ModelMemory`` and ``ComputedBy``.
    ``cosine_with_float32`` is only there for a quantised model: the mean over some texts.
    """

    id: str
    created: int
    root: str
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    task: str | msgspec.UnsetType = msgspec.UNSET
    tasks: list[PoolingTask] | msgspec.UnsetType = msgspec.UNSET
    name: str
    owned_by: str = "trio_pool_serve"
    object: str = "model"
    state: ModelState
    last_used: int | msgspec.UnsetType = msgspec.UNSET
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET
    device_memory_bytes: int | msgspec.UnsetType = msgspec.UNSET
    fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    backend: str | msgspec.UnsetType = msgspec.UNSET
    cosine_with_float32: float | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class ModelList:
    """The response of ``/v1/models``: OpenAI's clients use ``data``, Cohere's use ``models``."""

    data: list[ModelCard]
    models: list[ModelCard]
    object: str = "list"


TASK_PREFERENCE: tuple[PoolingTask, ...] = (
    "embed",
    "score",
    "classify",
    "token_embed",
    "sparse_embed",
    "token_classify",
)
"""The first of these that a model can do is the ``task`` of its entry."""


def tasks_of(folder: AnyModelFolder) -> list[PoolingTask]:
    """Return the tasks of a model, the preferred one first."""
    return [task for task in TASK_PREFERENCE if task in folder.spec.tasks]


def describe_served(service: Service, served: ServedModel, name: str) -> ModelCard:
    """Return the entry of a model by one of its names."""
    folder, cosine = served.folder, served.cosine_with_float32
    computed_by = served.computed_by if served.loaded is None else served.loaded.computed_by
    tasks = [] if folder is None else tasks_of(folder)
    return ModelCard(
        id=name,
        name=name,
        created=int(max(service.started, served.created)),
        root=served.source.shown_location,
        max_model_len=msgspec.UNSET if folder is None else folder.max_model_len,
        task=msgspec.UNSET if folder is None else folder.task or tasks[0],
        tasks=tasks or msgspec.UNSET,
        state=served.shown_state,
        last_used=msgspec.UNSET if served.last_used is None else int(served.last_used),
        memory_bytes=served.engine.worker.memory.resident_bytes or msgspec.UNSET,
        device_memory_bytes=served.engine.worker.memory.device_bytes or msgspec.UNSET,
        **{name: value for name, value in computed_by._asdict().items() if value},
        cosine_with_float32=msgspec.UNSET if cosine is None else round(cosine, 4),
    )


def model_of(service: Service, request: HttpRequest) -> tuple[ServedModel, str]:
    """Return the model that a request's path names, and that name. Raises ``NotFoundError``, ``EngineLoadingError``."""
    service.models.require_started()
    name = request.path.partition("/models/")[2]
    served = service.models.named(name) or service.models.named(name := name.rstrip("/"))
    if served is None or name not in served.source.names or served not in service.models.among(request.models):
        raise NotFoundError(f"The model `{name}` does not exist.")
    return served, name


def model_routes(service: Service) -> Routes:
    """Return the routes over a service."""

    async def models(request: HttpRequest) -> HttpResponse:
        service.models.require_started()
        cards = [
            describe_served(service, served, name)
            for served in service.models.among(request.models)
            for name in served.source.names
        ]
        return HttpResponse.json(ModelList(data=cards, models=cards))

    async def model(request: HttpRequest) -> HttpResponse:
        return HttpResponse.json(describe_served(service, *model_of(service, request)))

    return {("GET", MODELS_PATH): models, ("GET", "/models"): models, ("GET", MODEL_PATH): model}

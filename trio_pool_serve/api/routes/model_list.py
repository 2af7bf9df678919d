"""``/v1/models``: the models of the server, for OpenAI's and Cohere's clients."""

import msgspec
from attrs import frozen

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.service import ServedModel, Service
from trio_pool_serve.types import PoolingTask


@frozen(kw_only=True)
class ModelCard:
    """One entry of ``/v1/models``; ``tasks`` are those of this server, ``name`` is Cohere's name for the id.

    ``cosine_with_float32`` is only there for a quantised model: the mean over some texts.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    task: str
    tasks: list[PoolingTask]
    name: str
    owned_by: str = "trio_pool_serve"
    object: str = "model"
    cosine_with_float32: float | msgspec.UnsetType = msgspec.UNSET


@frozen(kw_only=True)
class ModelList:
    """The response of ``/v1/models``: OpenAI's clients use ``data``, Cohere's use ``models``."""

    data: list[ModelCard]
    models: list[ModelCard]
    object: str = "list"


TASK_PREFERENCE = ("embed", "score", "classify", "token_embed", "sparse_embed", "token_classify")
"""The first of these that a model can do is the ``task`` of its entry."""


def describe_served(service: Service, served: ServedModel, name: str) -> ModelCard:
    """Return the entry of a model under one of its names. Raises ``EngineLoadingError``."""
    model = service.model(served.source.name)
    cosine = model.engine.cosine_with_float32
    tasks = [task for task in TASK_PREFERENCE if task in model.folder.spec.tasks]
    return ModelCard(
        id=name,
        name=name,
        created=int(service.started),
        root=served.source.shown_location,
        max_model_len=model.renderer.max_model_len,
        task=model.folder.task or tasks[0],
        tasks=tasks,
        cosine_with_float32=msgspec.UNSET if cosine is None else round(cosine, 4),
    )


def model_routes(service: Service) -> Routes:
    """Return the routes over a service."""

    async def models(request: HttpRequest) -> HttpResponse:
        """List the models that the request may use. Raises ``EngineLoadingError``. Cancellation: has no checkpoint."""
        cards = [
            describe_served(service, served, name)
            for served in service.models(request.models)
            for name in (served.source.name, *served.source.aliases)
        ]
        return HttpResponse.json(ModelList(data=cards, models=cards))

    async def model(request: HttpRequest) -> HttpResponse:
        """Describe one model. Raises ``NotFoundError``, ``EngineLoadingError``. Cancellation: has no checkpoint."""
        name = request.path.partition("/models/")[2]
        served = service.named(name) or service.named(name := name.rstrip("/"))
        if served is None or served not in service.models(request.models):
            raise NotFoundError(f"The model `{name}` does not exist.")
        return HttpResponse.json(describe_served(service, served, name))

    return {("GET", "/v1/models"): models, ("GET", "/models"): models, ("GET", "/v1/models/{name}"): model}

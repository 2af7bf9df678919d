"""``/v1/models``: what is served, for OpenAI's and Cohere's clients."""

from attrs import frozen
from quart import Blueprint

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.quart_routes import responding
from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.service import ServedModel, Service
from trio_pool_serve.types import PoolingTask


@frozen(kw_only=True)
class ModelCard:
    """One entry of ``/v1/models``; ``tasks`` are ours, ``name`` is what Cohere calls the id."""

    id: str
    created: int
    root: str
    max_model_len: int
    task: str
    tasks: list[PoolingTask]
    name: str
    owned_by: str = "trio_pool_serve"
    object: str = "model"


@frozen(kw_only=True)
class ModelList:
    """The answer of ``/v1/models``: OpenAI's clients read ``data``, Cohere's read ``models``."""

    data: list[ModelCard]
    models: list[ModelCard]
    object: str = "list"


PREFERENCE = ("embed", "score", "classify", "token_embed", "sparse_embed", "token_classify")
"""Which of a model's tasks stands for all in the field that has room for one."""


def models_routes(service: Service) -> Blueprint:
    """Return the routes over a service."""
    routes = Blueprint("models", __name__)

    def card(served: ServedModel) -> ModelCard:
        model = service.model(served.source.name)
        tasks = [task for task in PREFERENCE if task in model.folder.spec.tasks]
        return ModelCard(
            id=model.name,
            name=model.name,
            created=int(service.started),
            root=served.source.location,
            max_model_len=model.renderer.max_model_len,
            task=tasks[0],
            tasks=tasks,
        )

    @routes.get("/v1/models")
    @responding
    async def models() -> Answer:
        cards = [card(served) for served in service.served.values()]
        return Answer.json(ModelList(data=cards, models=cards))

    @routes.get("/v1/models/<path:name>")
    @responding
    async def model(name: str) -> Answer:
        served = service.served.get(name)
        if served is None:
            raise NotFoundError(f"The model {name!r} does not exist.")
        return Answer.json(card(served))

    return routes

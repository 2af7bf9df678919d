"""Loading and unloading models while the server runs: ``POST /v1/models`` and ``DELETE /v1/models/{name}``."""

from typing import Annotated

import msgspec
from attrs import frozen

from trio_pool_serve.api.http.query import decode_query
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.api.routes.model_list import MODEL_PATH, MODELS_PATH, describe_served, model_of
from trio_pool_serve.config import ANY_NAME, ModelSource
from trio_pool_serve.errors import InvalidRequestError, ModelLoadError, PermissionDeniedError
from trio_pool_serve.service import Service

MODEL_CHANGES = frozenset({("POST", MODELS_PATH), ("DELETE", MODEL_PATH)})
"""The routes, which only API keys with ``admin`` may use."""

MAX_BODY_BYTES = 64 * 1024

MAX_NAME_CHARACTERS = 256
"""Names are labels of metrics."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/models``: a local folder or a hub id, and the model's names in the API."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    name: Name | None = None
    aliases: Annotated[list[Name], msgspec.Meta(max_length=16)] = []

    def source(self) -> ModelSource:
        """Return what is to be loaded. Raises ``InvalidRequestError``."""
        source = ModelSource(self.name or self.model, self.model, tuple(self.aliases))
        if len(source.name) > MAX_NAME_CHARACTERS:
            raise InvalidRequestError(
                f"A model of more than {MAX_NAME_CHARACTERS} characters requires a shorter `name`.", param="name"
            )
        if source.name == ANY_NAME:
            raise InvalidRequestError("`*` stands for all other names: it can be one of `aliases` only.", param="name")
        names = [source.name, *source.aliases]
        if len(set(names)) < len(names):
            raise InvalidRequestError("Two of the model's names are the same.", param="aliases")
        if not all(text.isprintable() for text in (source.location, *names)):
            raise InvalidRequestError("Names and paths consist of printable characters.", param="name")
        return source


class UnloadQuery(msgspec.Struct, frozen=True):
    """The query of ``DELETE /v1/models/{name}``."""

    drain: bool = False


@frozen
class DeletedModel:
    """The response of ``DELETE /v1/models/{name}``."""

    id: str
    deleted: bool = True
    object: str = "model"


def model_change_routes(service: Service) -> Routes:
    """Return the routes over a service."""

    def require_keys() -> None:
        if not service.api_keys.are_needed:
            raise PermissionDeniedError("Models can be changed by a server with API keys only: see --api-key.")

    async def load(request: HttpRequest) -> HttpResponse:
        """Load a model, and describe it once it is loaded.

        Raises as ``ServedModels.add``, and ``InvalidRequestError`` with the reason if the model cannot be loaded.
        Cancellation: at once; a model that has begun to be loaded is loaded all the same.
        """
        require_keys()
        service.require_open()
        request.body.lower_limit(MAX_BODY_BYTES)
        body = await request.body.take(service.config.time_limits.client_timeout_s)
        try:
            source = msgspec.json.decode(body, type=LoadRequest).source()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'The body is not {{"model": "PATH OR HUB ID"}}: {error}.') from error
        if request.models is not None and request.models.isdisjoint(source.names):
            raise PermissionDeniedError(f"The API key may not use a model `{source.name}`.")
        try:
            served = await service.models.add(source)
        except ModelLoadError as error:
            raise InvalidRequestError(f"The model cannot be loaded: {error}", param="model") from error
        return HttpResponse.json(describe_served(service, served, source.name))

    async def unload(request: HttpRequest) -> HttpResponse:
        """Unload a model, and respond when its memory is free.

        Raises as ``ServedModels.remove``, and ``NotFoundError``. Cancellation: at once; the model is unloaded all the
        same.
        """
        require_keys()
        drains = decode_query(request, UnloadQuery).drain
        served = model_of(service, request)
        await service.models.remove(served, drains=drains)
        return HttpResponse.json(DeletedModel(served.source.name))

    return {("POST", MODELS_PATH): load, ("DELETE", MODEL_PATH): unload}

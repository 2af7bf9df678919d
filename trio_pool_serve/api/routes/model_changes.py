"""Loading and unloading models while the server runs: ``POST /v1/models`` and ``DELETE /v1/models/{name}``."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.api.routes.model_list import MODEL_PATH, MODELS_PATH, describe_served, model_of
from trio_pool_serve.config import ANY_NAME, ModelConfig, ModelSource
from trio_pool_serve.config.model_sources import source_of_table
from trio_pool_serve.errors import InvalidRequestError, ModelLoadError, PermissionDeniedError
from trio_pool_serve.models.files.chat_template import JINJA
from trio_pool_serve.service import Service

MODEL_CHANGES = frozenset({("POST", MODELS_PATH), ("DELETE", MODEL_PATH)})
"""The routes, which only API keys with ``admin`` may use."""

MAX_BODY_BYTES = 64 * 1024

MAX_NAME_CHARACTERS = 256
"""Names are labels of metrics."""

NAMES = frozenset({"model", "name", "aliases"})

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class LoadRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /v1/models``: a local folder or a hub id, and the model's names in the API.

    Further fields are the model's own settings, as in a table of the TOML file.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    name: Name | None = None
    aliases: Annotated[list[Name], msgspec.Meta(max_length=16)] = []

    def source(self, settings: Mapping[str, object], shared: ModelConfig) -> ModelSource:
        """Return what to load, with the ``settings`` on top of the ``shared``. Raises ``InvalidRequestError``."""
        name = self.name or self.model
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequestError(
                f"A model of more than {MAX_NAME_CHARACTERS} characters requires a shorter `name`.", param="name"
            )
        if name == ANY_NAME:
            raise InvalidRequestError("`*` stands for all other names: it can be one of `aliases` only.", param="name")
        names = [name, *self.aliases]
        if len(set(names)) < len(names):
            raise InvalidRequestError("Two of the model's names are the same.", param="aliases")
        if not all(text.isprintable() for text in (self.model, *names)):
            raise InvalidRequestError("Names and paths consist of printable characters.", param="name")
        if "trust_remote_code" in settings:
            raise InvalidRequestError(
                "Only the server's own settings can trust a model's code, no request: --trust-remote-code.",
                param="trust_remote_code",
            )
        template = settings.get("chat_template")
        if isinstance(template, str) and not JINJA.search(template):
            raise InvalidRequestError(
                "In a request, `chat_template` is the template itself; it has no {{, {% or {#.", param="chat_template"
            )
        try:
            return source_of_table(name, {**settings, "model": self.model, "aliases": self.aliases}, shared)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error


class UnloadQuery(msgspec.Struct, frozen=True):
    """The query of ``DELETE /v1/models/{name}``."""

    drain: bool = False


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
        body = await request.body.take_small(MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
            settings = {key.replace("-", "_"): value for key, value in fields.items() if key not in NAMES}
            source = msgspec.convert(fields, LoadRequest).source(settings, service.config.loading)
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
        drains = request.query(UnloadQuery).drain
        served, _ = model_of(service, request)
        await service.models.remove(served, drains=drains)
        return HttpResponse.json({"id": served.source.name, "deleted": True, "object": "model"})

    return {("POST", MODELS_PATH): load, ("DELETE", MODEL_PATH): unload}

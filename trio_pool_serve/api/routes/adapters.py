"""LoRA adapters of served models: listed beside them, loaded and unloaded at run time, also by vLLM's routes."""

from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from attrs import evolve

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.config import ANY_NAME
from trio_pool_serve.config.model_sources import HUB_ID
from trio_pool_serve.errors import (
    ConflictError,
    InvalidRequestError,
    ModelLoadError,
    NotFoundError,
    require_request,
)
from trio_pool_serve.service import Service
from trio_pool_serve.serving.adapter_changes import add_adapter, remove_adapter
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.serving.served_model import ServedModel

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER_CHANGES = frozenset({("POST", LOAD_PATH), ("POST", UNLOAD_PATH)})
"""The routes that change adapters, which only API keys with ``admin`` may use."""

MAX_BODY_BYTES = 64 * 1024

MAX_NAME_CHARACTERS = 256
"""Maximum length of a name, which is a label of metrics."""

ACCEPTED_NAMES = (
    "Names and paths consist of printable characters; names have no blanks at their ends, and not only slashes."
)

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Location: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]

Body = TypeVar("Body")


class NewAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/models`` for an adapter: a local folder or a hub id, its name, and the model's name."""

    model: Location
    name: Name
    parent: Name


class LoadedLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's body of ``LOAD_PATH``, and the name of the model if it is not the first."""

    lora_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    lora_path: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    """Ignored: it is about mixtures of experts, which have no adapters here."""
    parent: Name | None = None


class UnloadedLora(msgspec.Struct, frozen=True):
    """vLLM's body of ``UNLOAD_PATH``; other fields are ignored, as in vLLM."""

    lora_name: str = ""


def adapter_object(served: ServedModel, adapter: ServedAdapter, card: dict[str, object]) -> dict[str, object]:
    """Return the entry of an adapter in the list of models: its model's ``card``, with its own fields."""
    used = {} if adapter.last_used is None else {"last_used": int(adapter.last_used)}
    own = {"id": adapter.name, "name": adapter.name, "root": adapter.shown_location, "parent": served.source.name}
    if "fingerprint" in card and served.loaded is not None and adapter.adapter is not None:
        own["fingerprint"] = evolve(served.loaded, adapter=adapter.adapter).computed_by.fingerprint
    state = {"state": "loading"} if adapter.adapter is None and served.loaded is not None else {}
    card = {
        key: value for key, value in card.items() if key not in ("memory_bytes", "device_memory_bytes", "last_used")
    }
    return {**card, **own, **state, **used, "created": int(adapter.created)}


async def body_of(service: Service, request: HttpRequest) -> bytes:
    """Return the body of a request that changes models. Raises and is cancelled as ``RequestBody.take``."""
    return await request.body.take_small(MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)


def decoded(body: bytes, kind: type[Body], expected: str) -> Body:
    """Return the fields of a JSON body. Raises ``InvalidRequestError`` with the form that is ``expected``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not {expected}: {error}.") from error


def are_accepted(path: str, *names: str) -> bool:
    """Return whether a path and names follow ``ACCEPTED_NAMES``."""
    return path.isprintable() and all(
        name.isprintable() and name == name.strip() and name.strip("/") != "" for name in names
    )


async def load_adapter(
    service: Service, request: HttpRequest, new: NewAdapter, *, replaces: bool = False
) -> tuple[ServedModel, ServedAdapter]:
    """Add an adapter.

    Raises as ``add_adapter``, and ``InvalidRequestError`` with the reason if the adapter cannot be applied.
    Cancellation: at once; it is not added.
    """
    require_request(
        are_accepted(new.model, new.name) and new.name != ANY_NAME, f"{ACCEPTED_NAMES} `*` is no name.", param="name"
    )
    request.require_name(new.name)
    adapter = ServedAdapter(new.name, new.model)
    try:
        served = await add_adapter(service.models, new.parent, adapter, replaces=replaces, among=request.models)
    except ModelLoadError as error:
        raise InvalidRequestError(f"The adapter cannot be loaded: {error}", param="model") from error
    return served, adapter


def adapter_change_routes(service: Service) -> Routes:
    """Return vLLM's routes that load and unload adapters; errors have its statuses and messages where it has them."""

    async def load(request: HttpRequest) -> HttpResponse:
        """Load an adapter. Raises as ``load_adapter``. Cancellation: at once; it is not added."""
        service.require_changes()
        body = decoded(await body_of(service, request), LoadedLora, '{"lora_name": "NAME", "lora_path": "FOLDER"}')
        require_request(bool(body.lora_name and body.lora_path), "Both 'lora_name' and 'lora_path' must be provided.")
        is_folder: bool = await service.offload.run("download", lambda: Path(body.lora_path).expanduser().is_dir())
        if not (is_folder or HUB_ID.fullmatch(body.lora_path)):
            raise NotFoundError(f"Loading lora {body.lora_name} failed: No adapter found for {body.lora_path}")
        parent = body.parent or service.models.find(among=request.models).source.name
        try:
            new = NewAdapter(body.lora_path, body.lora_name, parent)
            await load_adapter(service, request, new, replaces=body.load_inplace)
        except ConflictError as error:
            named = service.models.named(body.lora_name)
            if body.load_inplace or named is None or body.lora_name not in named.adapters:
                raise
            raise InvalidRequestError(
                f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                param="lora_name",
            ) from error
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: HttpRequest) -> HttpResponse:
        """Unload an adapter; requests that use it go on. Cancellation: at once, before anything has changed."""
        service.require_changes()
        body = decoded(await body_of(service, request), UnloadedLora, '{"lora_name": "NAME"}')
        require_request(bool(body.lora_name), "'lora_name' needs to be provided to unload a LoRA adapter.")
        served = service.models.named(body.lora_name)
        if served is None or (served, body.lora_name) not in [
            (model, adapter.name) for model, adapter in service.models.adapters_among(request.models)
        ]:
            raise NotFoundError(f"The lora adapter '{body.lora_name}' cannot be found.")
        remove_adapter(served, body.lora_name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return {("POST", LOAD_PATH): load, ("POST", UNLOAD_PATH): unload}


def _said(text: str) -> HttpResponse:
    return HttpResponse(text.encode(), "text/plain; charset=utf-8")

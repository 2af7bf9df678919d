"""Ollama's routes that describe models, and the routes that are refused: no model is downloaded, no text generated."""

import time
from datetime import UTC, datetime
from hashlib import sha256
from typing import NoReturn

import msgspec
import trio

import trio_pool_serve
from trio_pool_serve.api.dialects.ollama import MODEL_SUFFIXES
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, fixed, no_generation
from trio_pool_serve.api.routes.models import names_among
from trio_pool_serve.errors import InvalidRequestError, NotFoundError, require_request
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.service import Service
from trio_pool_serve.serving.served_model import ServedModel

PATHS = ("/api/tags", "/api/ps", "/api/version", "/api/show", "/api/pull", "/api/generate", "/api/chat")

MAX_BODY_BYTES = 4096

FOR_EVER, FOR_EVER_S = "9999-12-31T23:59:59Z", 1e9


class ModelRequest(msgspec.Struct, frozen=True):
    """The body of requests about one model; ``name`` is an older name of ``model``."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


def tagged(name: str) -> str:
    """Return a model's name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _entry(served: ServedModel, name: str, folder: AnyModelFolder) -> dict[str, object]:
    """Return what all routes say of a model. Its size is that in memory, which is known without reading files."""
    source = f"{served.source.shown_location} {served.facts.computed_by.fingerprint}"
    memory = served.engine.devices.memory
    lengths = {"context_length": folder.max_model_len, "embedding_length": served.dimensions}
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _time(served.created),
        "size": memory.resident_bytes + memory.device_bytes,
        "digest": sha256(source.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": folder.model_type,
            "families": [folder.model_type],
            "parameter_size": "",
            "quantization_level": served.facts.computed_by.dtype,
            **{key: length for key, length in lengths.items() if length},
        },
        "capabilities": ["embedding"] if "embed" in folder.spec.tasks else [],
    }


def _expires_at(served: ServedModel, idle_s: float) -> str:
    """Return when a model would be unloaded if no request came; ``idle_s`` is ``--idle-unload-s``."""
    if not 0 < idle_s < FOR_EVER_S:
        return FOR_EVER
    unused_s = 0 if served.users else trio.current_time() - served.idle_since
    return _time(time.time() + max(0.0, idle_s - unused_s))


def ollama_routes(service: Service) -> Routes:
    """Return the routes of Ollama's API that compute nothing."""

    def models(request: HttpRequest) -> list[tuple[ServedModel, str, AnyModelFolder]]:
        service.models.require_started()
        return [
            (served, name, served.folder)
            for served, name in names_among(service, request.models)
            if served.folder is not None
        ]

    async def tags(request: HttpRequest) -> HttpResponse:
        return HttpResponse.json({"models": [_entry(*model) for model in models(request)]})

    async def running(request: HttpRequest) -> HttpResponse:
        """Respond with the loaded models. Cancellation: has no checkpoint."""
        idle_s = service.config.model_changes.idle_unload_s
        loaded = [
            {
                **_entry(served, name, folder),
                "expires_at": _expires_at(served, idle_s),
                "size_vram": served.engine.devices.memory.device_bytes,
                "context_length": folder.max_model_len,
            }
            for served, name, folder in models(request)
            if served.loaded is not None
        ]
        return HttpResponse.json({"models": loaded})

    async def show(request: HttpRequest) -> HttpResponse:
        """Describe a model. Raises ``InvalidRequestError`` and ``NotFoundError``. Cancellation: at once."""
        served, name, folder = find(request, await asked(request))
        family = folder.model_type
        info = {
            "general.architecture": family,
            "general.basename": name,
            f"{family}.context_length": folder.max_model_len,
            f"{family}.embedding_length": served.dimensions,
        }
        entry = _entry(served, name, folder)
        return HttpResponse.json(
            {
                "modelfile": f"# Served by trio_pool_serve\nFROM {served.source.shown_location}\n",
                "parameters": "",
                "template": "{{ .Prompt }}",
                "model_info": {key: value for key, value in info.items() if value},
                **{key: entry[key] for key in ("details", "capabilities", "modified_at")},
            }
        )

    async def pull(request: HttpRequest) -> HttpResponse:
        """Respond that a served model is there. Raises ``InvalidRequestError`` for others. Cancellation: at once."""
        body = await asked(request)
        try:
            find(request, body)
        except NotFoundError as error:
            raise InvalidRequestError(f"This server downloads no models. {error}", param="model") from error
        done = {"status": "success"}
        if body.stream is False:
            return HttpResponse.json(done)
        return HttpResponse(msgspec.json.encode(done) + b"\n", "application/x-ndjson")

    async def refuse(request: HttpRequest) -> NoReturn:
        raise InvalidRequestError(no_generation(request.path))

    async def asked(request: HttpRequest) -> ModelRequest:
        return await request.json(ModelRequest, MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)

    def find(request: HttpRequest, body: ModelRequest) -> tuple[ServedModel, str, AnyModelFolder]:
        name = body.model or body.name or ""
        require_request(bool(name), "is required", at="model")
        service.models.require_started()
        plain, _ = service.models.without_suffix(name, MODEL_SUFFIXES, among=request.models)
        served = service.models.find(plain, among=request.models)
        return served, plain or name, service.models.folder_of(served.source.name)

    return {
        ("GET", "/api/tags"): tags,
        ("GET", "/api/ps"): running,
        ("GET", "/api/version"): fixed(HttpResponse.json({"version": trio_pool_serve.__version__})),
        ("POST", "/api/show"): show,
        ("POST", "/api/pull"): pull,
        ("POST", "/api/generate"): refuse,
        ("POST", "/api/chat"): refuse,
    }

"""Discovery for clients of other products: probes, the default model, and the tensors of models."""

from collections.abc import Callable

import trio_pool_serve
from trio_pool_serve.api.dialects.open_inference import tensors_of
from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, fixed
from trio_pool_serve.api.routes.models import model_of
from trio_pool_serve.service import Service

V2_MODEL, V2_READY = "/v2/models/{name}", "/v2/models/{name}/ready"

AUTH_PATH = "/v1/cluster/auth"

STATES = ("live", "ready")


def nim_probe(state: str, *, ok: bool) -> HttpResponse:
    """Return the response to a probe of NIM's."""
    message = state if ok else f"not {state}"
    return HttpResponse.json({"object": "health.response", "message": message, state: ok}, 200 if ok else 503)


def weaviate_probe(_: str, *, ok: bool) -> HttpResponse:
    """Return the response to a probe of Weaviate's."""
    return HttpResponse(b"", None, 204 if ok else 503)


def v2_probe(state: str, *, ok: bool) -> HttpResponse:
    """Return the response to a probe of the Open Inference Protocol."""
    return HttpResponse.json({state: ok}, 200 if ok else 503)


PROBES = {"/v1/health": nim_probe, "/.well-known": weaviate_probe, "/v2/health": v2_probe}

OPEN_PATHS = (*(f"{path}/{state}" for path in PROBES for state in STATES), AUTH_PATH)
"""Paths that need no key: their responses hold nothing but a state."""


def discovery_routes(service: Service) -> Routes:
    """Return the routes that clients of other products request before they send work."""

    def probe(state: str, write: Callable[..., HttpResponse]) -> Handler:
        async def respond(_: HttpRequest) -> HttpResponse:
            """Respond whether the process is alive, or the models are loaded. Cancellation: has no checkpoint."""
            return write(state, ok=service.state != "dead" if state == "live" else service.is_healthy)

        return respond

    async def meta(request: HttpRequest) -> HttpResponse:
        """Describe the default model, as Weaviate's containers do. Cancellation: has no checkpoint."""
        service.models.require_started()
        served = service.models.find(among=request.models)
        return HttpResponse.json({"model": served.source.name, "version": trio_pool_serve.__version__})

    async def v2_model(request: HttpRequest) -> HttpResponse:
        """Describe the tensors of a model. Raises ``NotFoundError`` and ``InvalidRequestError``."""
        served, name = model_of(service, request)
        folder = service.models.folder_of(name)  # known, even if the model is unloaded
        inputs, output = tensors_of(folder.spec)
        length = {"embedding": served.dimensions or -1, "probabilities": len(folder.spec.labels)}.get(output)
        return HttpResponse.json(
            {
                "name": name,
                "versions": [],
                "platform": "trio_pool_serve",
                "inputs": [{"name": each, "datatype": "BYTES", "shape": [-1]} for each in inputs],
                "outputs": [
                    {"name": output, "datatype": "FP32", "shape": [-1] if length is None else [-1, length]},
                ],
            }
        )

    async def v2_ready(request: HttpRequest) -> HttpResponse:
        """Respond whether a model is loaded. Raises ``NotFoundError``. Cancellation: has no checkpoint."""
        served, name = model_of(service, request)
        ready = served.loaded is not None
        return HttpResponse.json({"name": name, "ready": ready}, 200 if ready else 503)

    return {
        **{("GET", f"{path}/{state}"): probe(state, write) for path, write in PROBES.items() for state in STATES},
        ("GET", AUTH_PATH): fixed(HttpResponse.json({"auth": service.api_keys.are_needed})),
        ("GET", "/meta"): meta,
        ("GET", "/v2"): fixed(
            HttpResponse.json({"name": "trio_pool_serve", "version": trio_pool_serve.__version__, "extensions": []})
        ),
        ("GET", V2_MODEL): v2_model,
        ("GET", V2_READY): v2_ready,
    }

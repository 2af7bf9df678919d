"""What operators and probes ask."""

from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Response

import trio_pool_serve
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.snapshots import exposition_of, merged_load

LIVENESS_PATHS = ("/livez", "/health", "/ping")
READINESS_PATH = "/readyz"


def operations_routes(service: Service) -> Blueprint:
    """Return the operational routes over a service."""
    routes = Blueprint("operations", __name__)

    async def live() -> Response:
        """Tell whether the process is worth keeping; never waits behind compute."""
        dead = service.state == "dead"
        return _status("dead" if dead else "alive", ok=not dead)

    for path in LIVENESS_PATHS:
        routes.add_url_rule(path, endpoint=f"live_{path[1:]}", view_func=live)

    @routes.get(READINESS_PATH)
    async def ready() -> Response:
        state = service.state
        return _status(state, ok=state == "ready")

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Tell what all processes of the server count, added up."""
        exposition = partial(exposition_of, await service.snapshots())
        text = await service.offload.run("postprocess", exposition)
        return Response(text, content_type=CONTENT_TYPE_LATEST)

    @routes.get("/load")
    async def load() -> Response:
        """Tell what all processes of the server do, added up."""
        return _json(merged_load(await service.snapshots()))

    @routes.post("/reset_mm_cache")
    async def reset_mm_cache() -> Response:
        """Forget the images that are kept; the name is vLLM's."""
        service.media.cache.clear()
        return _status("cleared", ok=True)

    @routes.get("/version")
    async def version() -> Response:
        return _json({"version": trio_pool_serve.__version__})

    return routes


def _json(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status=status, content_type="application/json")


def _status(state: str, *, ok: bool) -> Response:
    return _json({"status": state}, 200 if ok else 503)

"""What operators ask."""

from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint

import trio_pool_serve
from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.quart_routes import responding
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.snapshots import exposition_of, merged_load


def operations_routes(service: Service) -> Blueprint:
    """Return the operational routes over a service."""
    routes = Blueprint("operations", __name__)

    @routes.get("/metrics")
    @responding
    async def metrics() -> Answer:
        """Tell what all processes of the server count, added up."""
        exposition = partial(exposition_of, await service.snapshots())
        text = await service.offload.run("postprocess", exposition)
        return Answer(text, content_type=CONTENT_TYPE_LATEST)

    @routes.get("/load")
    @responding
    async def load() -> Answer:
        """Tell what all processes of the server do, added up."""
        return Answer.json(merged_load(await service.snapshots()))

    @routes.post("/reset_mm_cache")
    @responding
    async def reset_mm_cache() -> Answer:
        """Forget the images that are kept; the name is vLLM's."""
        service.media.cache.clear()
        return Answer.json({"status": "cleared"})

    @routes.get("/version")
    @responding
    async def version() -> Answer:
        return Answer.json({"version": trio_pool_serve.__version__})

    return routes

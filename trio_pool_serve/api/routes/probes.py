"""What probes ask: is the process worth keeping, and would it do a task now."""

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.exchange import Exchange, Handler
from trio_pool_serve.service import Service

LIVENESS_PATHS = ("/livez", "/health", "/ping")
READINESS_PATH = "/readyz"


def probe_handlers(service: Service) -> dict[str, Handler]:
    """Return what answers the probes, by path."""

    async def live(_: Exchange) -> Answer:
        """Tell whether the process is worth keeping; never waits behind compute. Cancellation: waits for nothing."""
        dead = service.state == "dead"
        return _status("dead" if dead else "alive", ok=not dead)

    async def ready(_: Exchange) -> Answer:
        """Tell whether a task would be done now. Cancellation: waits for nothing."""
        state = service.state
        return _status(state, ok=state == "ready")

    return {**dict.fromkeys(LIVENESS_PATHS, live), READINESS_PATH: ready}


def _status(state: str, *, ok: bool) -> Answer:
    return Answer.json({"status": state}, 200 if ok else 503)

"""Operational endpoints: probes, metrics, load, version, and the engines on other machines."""

from collections.abc import Callable
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

import trio_pool_serve
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, fixed
from trio_pool_serve.api.routes.console import LIVE_PATH
from trio_pool_serve.api.routes.discovery import OPEN_PATHS
from trio_pool_serve.engine.deep_probe import failures_of
from trio_pool_serve.engine.places.host_places import HostPlaces
from trio_pool_serve.errors import PermissionDeniedError
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.snapshots import exposition_of, merged_load

LIVENESS_PATH, READINESS_PATH = "/livez", "/readyz"
HEALTH_PATHS = ("/health", "/ping", "/")
"""Paths of health checks; the last is the default of load balancers, and a probe of text-embeddings-inference."""

RUNNING = "Ollama is running"

PROBE_PATHS = (LIVENESS_PATH, READINESS_PATH, *HEALTH_PATHS, *OPEN_PATHS)

PROBE_ROUTES = frozenset(
    {
        *((method, path) for method in ("GET", "HEAD") for path in PROBE_PATHS),
        ("POST", "/ping"),
    }
)
"""Methods and paths of probes, which carry no API key; responses hold nothing but a state and its reason."""

DEEP = (b"deep", b"deep=1", b"deep=true")
"""Query strings of ``/readyz`` that ask for a deep probe."""

HOSTS_PATH, DRAIN_PATH = "/engine_hosts", "/engine_hosts/drain"

HOST_ROUTES = (("GET", HOSTS_PATH), ("POST", HOSTS_PATH), ("POST", DRAIN_PATH))

MAX_BODY_BYTES = 4096

MONITORED_PATHS = frozenset({"/metrics", "/load", LIVE_PATH})
"""Paths that show the load of all clients and change nothing: ``--api-key-scope`` may open them to monitoring."""

ADMIN_PATHS = MONITORED_PATHS | {"/reset_mm_cache", HOSTS_PATH, DRAIN_PATH}
"""Paths that show or affect all clients: only keys of ``--api-keys-file`` with ``admin`` may use them."""


def operational_routes(service: Service) -> Routes:
    """Return the operational routes over a service."""
    # With engines on other machines, other servers admit by the same queues and would refuse the request as well.
    shares_all_engines = service.config.processes.engine == "hosts"

    async def liveness(_: HttpRequest) -> HttpResponse:
        state = "dead" if service.state == "dead" else "alive"
        return _status(state, ok=state == "alive")

    async def readiness(request: HttpRequest) -> HttpResponse:
        """Respond whether a task would be accepted now; with ``?deep=true``, after computing one short input.

        Cancellation: as ``DeepProbe.update``.
        """
        state = service.state
        if state == "stalled":
            return _status(state, ok=False, reason=service.stall_reason)
        if state == "ready" and request.scope["query_string"] in DEEP:
            if failure := await failures_of([served.probe for served in service.models.present]):
                return _status("failing", ok=False, reason=failure)
            state = service.state  # it took a while
        return _status(state, ok=state == "ready" or (state == "overloaded" and shares_all_engines))

    async def health(_: HttpRequest) -> HttpResponse:
        """Respond whether the models are loaded, as other servers do by being up. Cancellation: has no checkpoint.

        A server that drains is still healthy: it will answer the requests that it has accepted.
        """
        return _status(service.state, ok=service.is_healthy)

    async def root(_: HttpRequest) -> HttpResponse:
        """Respond as ``health``, in text: clients of Ollama compare it. Cancellation: has no checkpoint."""
        ok = service.is_healthy
        text = RUNNING if ok else service.state
        return HttpResponse(text.encode(), "text/plain; charset=utf-8", 200 if ok else 503)

    async def metrics(_: HttpRequest) -> HttpResponse:
        text = await service.offload.run("postprocess", partial(exposition_of, await service.snapshots()))
        return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)

    async def load(_: HttpRequest) -> HttpResponse:
        return HttpResponse.json(merged_load(await service.snapshots()))

    async def reset_mm_cache(_: HttpRequest) -> HttpResponse:
        """Clear the cache of images; the name is vLLM's. Cancellation: has no checkpoint."""
        service.media.cache.clear()
        return HttpResponse.json({"status": "cleared"})

    return {
        ("GET", LIVENESS_PATH): liveness,
        ("GET", READINESS_PATH): readiness,
        **{("GET", path): health for path in HEALTH_PATHS},
        ("GET", "/"): root,
        ("POST", "/ping"): health,
        ("GET", "/metrics"): metrics,
        ("GET", "/load"): load,
        ("GET", "/version"): fixed(HttpResponse.json({"version": trio_pool_serve.__version__})),
        ("POST", "/reset_mm_cache"): reset_mm_cache,
    }


def _status(state: str, *, ok: bool, reason: str = "") -> HttpResponse:
    return HttpResponse.json({"status": state, **({"reason": reason} if reason else {})}, 200 if ok else 503)


class HostRequest(msgspec.Struct, frozen=True):
    """The body of requests that change something."""

    host: str


def host_routes(service: Service, hosts: HostPlaces) -> Routes:
    """Return the routes over the hosts of a service; changes need an API key in any case."""

    async def list_hosts(_: HttpRequest) -> HttpResponse:
        return HttpResponse.json({"hosts": hosts.described()})

    async def change(apply: Callable[[str], object], request: HttpRequest) -> HttpResponse:
        if not service.api_keys.are_needed:
            raise PermissionDeniedError("Only a server with API keys (--api-key) lets clients change its hosts.")
        body = await request.json(HostRequest, MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)
        apply(body.host)
        return await list_hosts(request)

    return {
        ("GET", HOSTS_PATH): list_hosts,
        ("POST", HOSTS_PATH): partial(change, hosts.add),
        ("POST", DRAIN_PATH): partial(change, hosts.drain),
    }

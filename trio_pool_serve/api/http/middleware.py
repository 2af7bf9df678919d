"""The middleware around every handler."""

from collections.abc import Collection, Mapping, Sequence

import trio
from attrs import Factory, define, field

from trio_pool_serve.access.client_labels import ClientLabels
from trio_pool_serve.access.key_file import ApiKey
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.error_responses import error_response
from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import AuthenticationError, PermissionDeniedError, forget_frames, innermost
from trio_pool_serve.service import Service
from trio_pool_serve.types import Client

EXPOSED_HEADERS = (
    "metadata, model-fingerprint, retry-after, retry-after-ms, server-timing, x-request-id, "
    "x-compute-characters, x-compute-time, x-compute-tokens"
)
"""Response headers that scripts in web pages of allowed origins may read."""


MODEL_LIST = frozenset({"/v1/models", "/models", "/v1/models/{name}"})


@define(eq=False)
class Middleware:
    """API-key authentication, error responses, request ids, timing headers and counters.

    An error is written in the dialect of the endpoint that the request was decoded for. Before that is known, it is
    written in all dialects of the path (``by_path``), or in ``default``. ``open_routes``, methods with paths, need no
    API key, whatever ``--api-key-scope`` is; the paths ``for_admins``, or methods with paths as routes have them, need
    a key with ``admin``. With ``--api-key-scope vllm``, the ``monitored`` ones of these need no key.
    """

    _service: Service
    _default: Dialect = field(kw_only=True)
    _by_path: Mapping[str, Sequence[Dialect]] = field(kw_only=True)
    _open_routes: Collection[tuple[str, str]] = field(kw_only=True)
    _for_admins: Collection[str | tuple[str, str]] = field(kw_only=True)
    _monitored: Collection[str] = field(kw_only=True)
    _network: NetworkConfig = field(
        init=False, default=Factory(lambda self: self._service.config.network, takes_self=True)
    )
    _labels: ClientLabels = field(
        init=False,
        default=Factory(
            lambda self: ClientLabels(self._network.proxy_networks, self._network.trusts_unix), takes_self=True
        ),
    )
    _origins: frozenset[str] = field(
        init=False,
        default=Factory(
            lambda self: frozenset(filter(None, map(str.strip, self._network.cors_allow_origins.split(",")))),
            takes_self=True,
        ),
    )

    async def respond(self, request: HttpRequest, handler: Handler) -> HttpResponse:
        """Return the handler's response, or an error response.

        Cancellation: as the handler's. An error raised together with a cancellation is answered; the next checkpoint
        cancels.
        """
        try:
            self.authenticate(request)
            response = await handler(request)
        except BaseExceptionGroup as group:
            rest = group.split(trio.Cancelled)[1]
            cause = None if rest is None or rest.split(Exception)[1] is not None else innermost(rest)
            if not isinstance(cause, Exception):
                raise
            response = self.error_response(request, cause)
        except Exception as error:
            response = self.error_response(request, error)
        return self.finished(request, response)

    def authenticate(self, request: HttpRequest) -> None:
        """Identify the client of a request, and count the request for its key.

        Raises ``AuthenticationError`` if it lacks a required API key, ``PermissionDeniedError`` if the key may not use
        the route, and ``OverloadedError`` past its limits.
        """
        key = self.identify(request)
        if key is None:
            return
        if not request.is_forwarded:
            request.apply_limits(self._service.api_keys.usage_of(key))
        route = request.scope.get("method", "WEBSOCKET"), request.route
        if (request.path in self._for_admins or route in self._for_admins) and not key.admin:
            raise PermissionDeniedError("This route needs an API key with `admin`; yours has none.")

    def identify(self, request: HttpRequest) -> ApiKey | None:
        """Note the client of a request by its label or, if a key is needed there, by the key, and return that.

        Raises ``AuthenticationError`` if it has none.
        """
        address = request.scope.get("client")
        request.client = Client(self._labels.label(address[0] if address else "", request.scope["headers"]))
        keys = self._service.api_keys
        if not keys.are_needed:
            return None
        is_needed = self._needs_key(request)
        if not is_needed and request.route not in MODEL_LIST:
            return None
        key = keys.find(request.headers)  # one that is not needed still limits the models
        if key is None:
            if is_needed:
                is_sent = keys.are_sent(request.headers)
                raise AuthenticationError("Invalid API key." if is_sent else "Send Authorization: Bearer KEY.")
            return None
        request.key, request.client, request.models = key, Client(key.name, key.may_outrank), key.models
        return key

    def _needs_key(self, request: HttpRequest) -> bool:
        method, path = request.scope.get("method", "WEBSOCKET"), request.path
        if (method, path) in self._open_routes or (self._origins and method == "OPTIONS"):
            return False  # browsers ask for a page's permission without its key
        if self._network.api_key_scope == "vllm":
            return path.startswith(("/v1", "/v2")) or (path in self._for_admins and path not in self._monitored)
        if self._network.api_key_scope == "all-but-models":
            return method not in ("GET", "HEAD") or request.route not in MODEL_LIST
        return self._network.api_key_scope == "all" or path != "/metrics"

    def error_response(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Count a request that failed, and return its response."""
        self._service.metrics.count_failure(error)
        request.error = error
        endpoint = request.claimed_by
        route = getattr(error, "near", None) or request.route
        dialects = self._by_path.get(route, (self._default,)) if endpoint is None else (endpoint.dialect,)
        response = error_response(error, request, dialects)
        forget_frames(error)
        return response

    def finished(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Count a response, and add its headers: the request's id; for tasks, timings and the model's fingerprint."""
        request.status = response.status
        headers = {"x-request-id": request.request_id}
        if request.span is not None and self._service.tracing is not None:
            headers["traceparent"] = self._service.tracing.traceparent_of(request.span)
        if self._origins:
            headers |= self._cors_headers(request)
        if request.fingerprint:
            headers["model-fingerprint"] = request.fingerprint
        if request.is_task:
            headers["server-timing"] = request.timings.server_timing()
            self._service.metrics.requests.inc()
        return response.with_headers(headers)

    def _cors_headers(self, request: HttpRequest) -> dict[str, str]:
        """Return the headers that let a web page of an allowed origin read the response."""
        origin = "*" if "*" in self._origins else request.header(b"origin")
        if origin not in self._origins:
            return {"vary": "origin"}
        headers = {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED_HEADERS}
        if origin != "*":
            headers["vary"] = "origin"
        if request.scope["method"] == "OPTIONS":
            headers["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
            # Clients in browsers send headers of their own, none of which means anything here.
            asked = request.header(b"access-control-request-headers")
            headers["access-control-allow-headers"] = asked or "authorization, content-type"
        return headers

"""What is logged and traced of a request: never its path, its query, its fields or its texts."""

from collections.abc import Mapping
from typing import Any

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.service import Service

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

OTHER = "other"
"""A method or a path that no route of the server has; routes of users are among them."""


def begin_trace(request: HttpRequest, service: Service) -> None:
    """Open the span of a request that begins, if requests are traced."""
    if service.tracing is not None:
        request.span = service.tracing.start(_method_of(request), request.route or OTHER, request.headers)


def log_request(request: HttpRequest, service: Service) -> None:
    """Log a request that has ended, if it is to be logged, and end its span, if it has one."""
    failed = request.outcome == "failed"
    is_logged = service.access_log.wants(failed=failed)
    if not is_logged and request.span is None:
        return
    event = event_of(request)
    if is_logged:
        service.access_log.add(event, failed=failed)
    if request.span is not None and service.tracing is not None:
        service.tracing.end(request.span, event, request.timings.stages() if request.timings.rows else {})


def event_of(request: HttpRequest) -> Mapping[str, Any]:
    """Return the fields of a request's event; durations are in milliseconds."""
    error, timings = request.error, request.timings
    event = {
        "request_id": request.request_id,
        "client": request.client.label,
        "method": _method_of(request),
        "route": request.route or OTHER,
        "status": request.status,
        "outcome": request.outcome,
        "cancel_reason": request.cancel_reason,
        "error": None if error is None else type(error).__name__,
        "model": request.model,
        "total_ms": round(timings.total_s * 1e3, 3),
    }
    if timings.rows:
        stages = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in timings.stages().items()}
        event |= {"rows": timings.rows, "tokens": timings.tokens, **stages}
    return event


def _method_of(request: HttpRequest) -> str:
    method: str = request.scope["method"]
    return method if method in METHODS else OTHER

"""The event of a request: a line of the access log, and the attributes of its span.

Of a request, its path, query, fields and texts are never logged or traced.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from trio_pool_serve.api.http.request import CLIENT_LEFT, HttpRequest
from trio_pool_serve.errors import DeadlineExceededError, DrainingError
from trio_pool_serve.service import Service

Outcome: TypeAlias = Literal["answered", "refused", "failed", "deadline", "drained", "client left", "cancelled"]
"""refused: an error status below 500, for a fault of the request. failed: a status from 500 on."""

OUTCOMES: Mapping[type[Exception], Outcome] = {DrainingError: "drained", DeadlineExceededError: "deadline"}
"""Outcomes of errors that are more specific than their statuses."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

OTHER = "other"
"""A method or a path that no route of the server has; routes of users are among them."""


def outcome_of(request: HttpRequest) -> Outcome:
    """Return how a request has ended."""
    if request.cancel_reason is not None:
        return "client left" if request.cancel_reason == CLIENT_LEFT else "cancelled"
    if request.error is None:
        return "answered"
    is_refused = request.status is not None and request.status < 500
    return OUTCOMES.get(type(request.error), "refused" if is_refused else "failed")


def begin_trace(request: HttpRequest, service: Service) -> None:
    """Open the span of a request that begins, if requests are traced."""
    if service.tracing is not None:
        request.span = service.tracing.start(_method_of(request), request.route or OTHER, request.headers)


def log_request(request: HttpRequest, service: Service, polled: Collection[tuple[str, str]] = ()) -> None:
    """Log a request that has ended, if the settings ask for it, and end its span, if it has one.

    ``polled`` are methods and routes that are requested every few seconds: of these only failures are logged.
    """
    failed = outcome_of(request) == "failed"
    is_polled = (request.scope["method"], request.route) in polled
    is_logged = service.access_log.wants(failed=failed) and (failed or not is_polled)
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
        "outcome": outcome_of(request),
        "cancel_reason": request.cancel_reason,
        "error": None if error is None else type(error).__name__,
        "model": request.model,
        "total_ms": round(timings.total_s * 1e3, 3),
    }
    if timings.rows:
        event |= {"rows": timings.rows, "tokens": timings.tokens}
        event |= {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in timings.stages().items()}
    return event


def _method_of(request: HttpRequest) -> str:
    method: str = request.scope["method"]
    return method if method in METHODS else OTHER

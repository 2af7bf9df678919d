"""What is logged of a request: never its path, its query, its fields or its texts."""

from collections.abc import Mapping
from typing import Any

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.telemetry.access_log import AccessLog

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

OTHER = "other"
"""A method or a path that no route of the server has; routes of users are among them."""


def log_request(request: HttpRequest, log: AccessLog) -> None:
    """Log a request that has ended, if it is to be logged."""
    failed = request.outcome == "failed"
    if log.wants(failed=failed):
        log.add(event_of(request), failed=failed)


def event_of(request: HttpRequest) -> Mapping[str, Any]:
    """Return the fields of a request's event; durations are in milliseconds."""
    method, error, timings = request.scope["method"], request.error, request.timings
    event = {
        "request_id": request.request_id,
        "client": request.client.label,
        "method": method if method in METHODS else OTHER,
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

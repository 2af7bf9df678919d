"""Names and values of span attributes, after OpenTelemetry's semantic conventions.

Those that begin with ``gen_ai.`` are still in development there, and change: they are in this module alone.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

Attributes: TypeAlias = dict[str, str | int | float]

OWN = "trio_pool_serve."
EMBEDDING_ROUTES = ("/embeddings", "/embed", "/embed_all", "/embed_sparse", "/multimodalembeddings")

NAMES: Mapping[str, str] = {
    "status": "http.response.status_code",
    "error": "error.type",
    "request_id": f"{OWN}request_id",
    "client": f"{OWN}client",
    "outcome": f"{OWN}outcome",
    "cancel_reason": f"{OWN}cancel_reason",
    "rows": f"{OWN}rows",
    "model": "gen_ai.request.model",
    "tokens": "gen_ai.usage.input_tokens",
}
"""Attributes by the fields of the access log."""

DURATION = f"{OWN}duration_ms"
"""Of a stage, on its event."""


def attributes_at_start(method: str, route: str) -> Attributes:
    """Return what is known when a request begins; samplers see these."""
    found: Attributes = {"http.request.method": method, "http.route": route, "url.scheme": "http"}
    if route.endswith(EMBEDDING_ROUTES):
        found["gen_ai.operation.name"] = "embeddings"
    return found


def attributes_at_end(event: Mapping[str, Any]) -> Attributes:
    """Return what is known once a request has ended, of its event in the access log."""
    return {name: event[field] for field, name in NAMES.items() if event.get(field) is not None}

"""The dialect of text-embeddings-inference."""

from typing import Any

from trio_pool_serve.api.dialects.tei.pooling_endpoints import POOLING_ENDPOINTS
from trio_pool_serve.api.dialects.tei.root_endpoint import ROOT
from trio_pool_serve.api.dialects.tei.scoring_endpoints import SCORING_ENDPOINTS
from trio_pool_serve.api.dialects.tei.token_endpoints import TOKEN_ENDPOINTS
from trio_pool_serve.api.http.endpoint import Dialect, WireError
from trio_pool_serve.errors import EmptyInputError, TaskNotSupportedError

ERROR_TYPES = {
    400: "Validation",
    401: "Unauthorized",
    403: "Unauthorized",
    404: "Validation",
    405: "Validation",
    408: "Timeout",
    413: "Validation",
    415: "UnsupportedMediaType",
    422: "Validation",
    429: "Overloaded",
    500: "Backend",
    503: "Unhealthy",
    504: "Timeout",
}
"""The ``error_type`` by this server's own status."""

STATUSES = {400: 422, 500: 424, 507: 424}
"""This dialect's status, if it differs from the server's own."""


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    if isinstance(error.cause, EmptyInputError):
        return 400, {"error": error.message, "error_type": "Empty"}
    if isinstance(error.cause, TaskNotSupportedError):  # TEI's own backend refuses it
        return 424, {"error": error.message, "error_type": "Backend"}
    status = STATUSES.get(error.status, error.status)
    return status, {"error": error.message, "error_type": ERROR_TYPES.get(error.status, "Backend")}


TEI = Dialect(
    name="tei", error_body=error_body, endpoints=(*POOLING_ENDPOINTS, *SCORING_ENDPOINTS, *TOKEN_ENDPOINTS, ROOT)
)

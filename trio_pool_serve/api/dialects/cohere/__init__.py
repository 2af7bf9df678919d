"""The Cohere dialect: versions 1 and 2 of its API, without the paths of version 1 that are vLLM's too."""

from typing import Any

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.cohere.pooling_endpoints import POOLING_ENDPOINTS
from trio_pool_serve.api.dialects.cohere.scoring_endpoints import SCORING_ENDPOINTS
from trio_pool_serve.api.dialects.cohere.token_endpoints import TOKEN_ENDPOINTS
from trio_pool_serve.api.http.endpoint import Dialect, WireError


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body of an error: Cohere's own has only the message, ``error`` is for clients that come from vLLM."""
    status, body = openai.error_body(error)
    return status, {"id": error.request_id, "message": error.message, **body}


COHERE = Dialect(
    name="cohere",
    error_body=error_body,
    endpoints=(*POOLING_ENDPOINTS, *SCORING_ENDPOINTS, *TOKEN_ENDPOINTS),
)

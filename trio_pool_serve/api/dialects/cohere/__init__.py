"""The Cohere dialect: versions 1 and 2 of its API, without the paths of version 1 that are vLLM's too."""

from typing import Any

from trio_pool_serve.api.dialects import openai
from trio_pool_serve.api.dialects.cohere.classify import CLASSIFY_ENDPOINT
from trio_pool_serve.api.dialects.cohere.embed import EMBED_ENDPOINTS
from trio_pool_serve.api.dialects.cohere.rerank import RERANK_ENDPOINT
from trio_pool_serve.api.dialects.cohere.tokens import TOKEN_ENDPOINTS
from trio_pool_serve.api.http.endpoint import Dialect, WireError


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body of an error: Cohere's own has only the message, ``error`` is for clients that come from vLLM."""
    status, body = openai.error_body(error)
    return status, {"id": error.request_id, "message": error.message, **body}


COHERE = Dialect(
    name="cohere",
    error_body=error_body,
    endpoints=(*EMBED_ENDPOINTS, RERANK_ENDPOINT, CLASSIFY_ENDPOINT, *TOKEN_ENDPOINTS),
)

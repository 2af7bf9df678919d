"""The dialect of text-embeddings-inference."""

from functools import partial
from typing import Any

from trio_pool_serve.api.dialects.tei.requests import (
    DecodeRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
)
from trio_pool_serve.api.dialects.tei.responses import (
    respond_decode,
    respond_predict,
    respond_rerank,
    respond_similarity,
    respond_tokenize,
    respond_vectors,
)
from trio_pool_serve.api.dialects.tei.root import RootRequest, respond_root
from trio_pool_serve.api.http.endpoint import Dialect, Endpoint, WireError

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
"""This dialect's status, where it is another than the server's own."""


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    if error.is_empty_input:
        return 400, {"error": error.message, "error_type": "Empty"}
    if error.is_unsupported_task:  # what such a model's backend cannot do
        return 424, {"error": error.message, "error_type": "Backend"}
    status = STATUSES.get(error.status, error.status)
    return status, {"error": error.message, "error_type": ERROR_TYPES.get(error.status, "Backend")}


_TEXTS = ["A nursery owns its tasks.", "Every task has a parent."]

_endpoint = partial(
    Endpoint[Any, Any], field_names={"prompts": "inputs", "truncate_to": "truncate"}, example={"inputs": _TEXTS}
)

TEI = Dialect(
    name="tei",
    error_body=error_body,
    endpoints=(
        _endpoint(
            paths=("/embed",),
            wire=EmbedRequest,
            to_job=EmbedRequest.dense,
            respond=respond_vectors,
            summary="Embed texts: one vector each.",
        ),
        _endpoint(
            paths=("/embed_all",),
            wire=EmbedRequest,
            to_job=EmbedRequest.all_tokens,
            respond=respond_vectors,
            summary="Embed texts: one vector for each of their tokens.",
        ),
        _endpoint(
            paths=("/embed_sparse",),
            wire=EmbedSparseRequest,
            to_job=EmbedSparseRequest.sparse,
            respond=respond_vectors,
            summary="Embed texts: weights over the vocabulary.",
        ),
        _endpoint(
            paths=("/predict",),
            wire=PredictRequest,
            respond=respond_predict,
            summary="Classify texts, or pairs of texts: their labels, best first.",
            example={"inputs": [[text] for text in _TEXTS]},
        ),
        _endpoint(
            paths=("/rerank",),
            discriminators=frozenset({"texts"}),
            wire=RerankRequest,
            respond=respond_rerank,
            field_names={"prompts": None, "documents": "texts", "truncate_to": "truncate"},
            summary="Sort texts by how well they match a query.",
            example={"query": "Who owns a task?", "texts": _TEXTS},
        ),
        _endpoint(
            paths=("/similarity",),
            wire=SimilarityRequest,
            respond=respond_similarity,
            field_names={"prompts": "inputs", "truncate_to": "parameters"},
            summary="Compare a sentence with others.",
            example={"inputs": {"source_sentence": "Who owns a task?", "sentences": _TEXTS}},
        ),
        _endpoint(
            paths=("/tokenize",),
            discriminators=frozenset({"inputs"}),
            wire=TokenizeRequest,
            respond=respond_tokenize,
            field_names={"prompts": "inputs"},
            summary="Tokenize texts.",
        ),
        _endpoint(
            paths=("/decode",),
            wire=DecodeRequest,
            respond=respond_decode,
            field_names={"token_ids": "ids"},
            summary="Turn tokens back into texts.",
            example={"ids": [[5, 6], [7]]},
        ),
        _endpoint(
            paths=("/",),
            wire=RootRequest,
            respond=respond_root,
            field_names={"prompts": ("texts", "inputs"), "truncate_to": "truncate"},
            summary="Do the model's main task: as /embed, /embed_sparse, /embed_all, /predict, /rerank or /similarity.",
        ),
    ),
)

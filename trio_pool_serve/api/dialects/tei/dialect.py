"""The dialect of text-embeddings-inference."""

from typing import Any

from trio_pool_serve.api.dialects.tei.answers import (
    answer_decode,
    answer_predict,
    answer_rerank,
    answer_similarity,
    answer_tokenize,
    answer_vectors,
)
from trio_pool_serve.api.dialects.tei.root import RootRequest, answer_root
from trio_pool_serve.api.dialects.tei.wire import (
    DecodeRequest,
    EmbedRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
)
from trio_pool_serve.api.http.endpoint import Dialect, Endpoint, WireError

ERROR_TYPES = {
    400: "Validation",
    401: "Unauthorized",
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
"""By our own status."""

STATUSES = {400: 422, 500: 424}
"""Where this dialect's status is not ours."""


def error_body(error: WireError) -> tuple[int, Any]:
    """Return the body that these clients read."""
    if error.is_empty_input:
        return 400, {"error": error.message, "error_type": "Empty"}
    status = error.status if error.is_unsupported_task else STATUSES.get(error.status, error.status)
    return status, {"error": error.message, "error_type": ERROR_TYPES.get(error.status, "Backend")}


_TEXTS = ["A nursery owns its tasks.", "Every task has a parent."]

TEI = Dialect(
    name="tei",
    error_body=error_body,
    endpoints=(
        Endpoint(
            paths=("/embed",),
            wire=EmbedRequest,
            read=EmbedRequest.dense,
            answer=answer_vectors,
            summary="Embed texts: one vector each.",
            example={"inputs": _TEXTS},
        ),
        Endpoint(
            paths=("/embed_all",),
            wire=EmbedRequest,
            read=EmbedRequest.all_tokens,
            answer=answer_vectors,
            summary="Embed texts: one vector for each of their tokens.",
            example={"inputs": _TEXTS},
        ),
        Endpoint(
            paths=("/embed_sparse",),
            wire=EmbedRequest,
            read=EmbedRequest.sparse,
            answer=answer_vectors,
            summary="Embed texts: weights over the vocabulary.",
            example={"inputs": _TEXTS},
        ),
        Endpoint(
            paths=("/predict",),
            wire=PredictRequest,
            read=PredictRequest.job,
            answer=answer_predict,
            summary="Classify texts, or pairs of texts: their labels, best first.",
            example={"inputs": [[text] for text in _TEXTS]},
        ),
        Endpoint(
            paths=("/rerank",),
            marks=frozenset({"texts"}),
            wire=RerankRequest,
            read=RerankRequest.job,
            answer=answer_rerank,
            summary="Sort texts by how well they fit a query.",
            example={"query": "Who owns a task?", "texts": _TEXTS},
        ),
        Endpoint(
            paths=("/similarity",),
            wire=SimilarityRequest,
            read=SimilarityRequest.job,
            answer=answer_similarity,
            summary="Compare a sentence with others.",
            example={"inputs": {"source_sentence": "Who owns a task?", "sentences": _TEXTS}},
        ),
        Endpoint(
            paths=("/tokenize",),
            marks=frozenset({"inputs"}),
            wire=TokenizeRequest,
            read=TokenizeRequest.job,
            answer=answer_tokenize,
            summary="Take texts apart into tokens.",
            example={"inputs": _TEXTS},
        ),
        Endpoint(
            paths=("/decode",),
            wire=DecodeRequest,
            read=DecodeRequest.job,
            answer=answer_decode,
            summary="Put tokens together to texts.",
            example={"ids": [[5, 6], [7]]},
        ),
        Endpoint(
            paths=("/", "/invocations"),
            wire=RootRequest,
            read=RootRequest.job,
            answer=answer_root,
            summary="Do what the model is for: as /embed, /embed_sparse, /embed_all, /predict, /rerank or /similarity.",
            example={"inputs": _TEXTS},
        ),
    ),
)

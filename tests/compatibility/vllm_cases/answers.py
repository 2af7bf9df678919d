"""Line 8: what good answers have."""

from typing import Any

from tests.compatibility.vllm_cases.case import (
    DOCUMENTS,
    DOCUMENTS_OF_RESULTS,
    LONG_TEXT,
    NO_DOCUMENTS,
    OTHER,
    SENTENCE,
    Case,
    get,
    post,
    post_fields,
)

RERANKERS = ("embedding", "cross-encoder", "late interaction", "generative reranker")
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
TRAINED = "has the markers of queries and documents, and the masks behind a query, that the model was trained with"
ID = {"X-Request-Id": "abc"}


def encodings() -> list[Case]:
    """Return the cases of numbers as bytes."""
    cases = []
    for dtype in DTYPES:
        for form in ("base64", "bytes", "bytes_only"):
            name, fields = f"`{dtype}`, `{form}`", {"embed_dtype": dtype, "encoding_format": form}
            cases += [
                post(name, "/v1/embeddings", "embedding", {"input": [SENTENCE, "Yes"], **fields}),
                post(name, "/pooling", "late interaction", {"input": SENTENCE, **fields}),
            ]
        for order in ("big", "little"):
            fields = {"embed_dtype": dtype, "encoding_format": "base64", "endianness": order}
            cases.append(post(f"`{dtype}`, `{order}`", "/v1/embeddings", "embedding", {"input": SENTENCE, **fields}))
    fields = {"embed_dtype": "fp8_e4m3", "use_activation": False}
    return [
        *cases,
        post(
            "`fp8_e4m3`, `float`",
            "/v1/embeddings",
            "embedding",
            {"input": SENTENCE, **fields},
            reason="the numbers are those that the type has",
            differs=("data",),
        ),
        post(
            "`fp8_e4m3`, not normalised",
            "/v1/embeddings",
            "embedding",
            {"input": SENTENCE, "encoding_format": "base64", **fields},
        ),
        post(
            "`fp8_e4m3`, `base64`",
            "/pooling",
            ("classifier", "token classifier"),
            {"input": SENTENCE, "encoding_format": "base64", **fields},
        ),
    ]


def cohere(name: str, *says: str, kinds: str | tuple[str, ...] = "embedding", **body: Any) -> Case:
    return post_fields(name, "/v2/embed", kinds, says=says, **body)


COHERE = (
    cohere("texts", kinds=("embedding", "bare decoder", "chat"), texts=[SENTENCE, OTHER]),
    cohere("`input_type` that the model has", kinds="embedding with prompts", texts=[SENTENCE], input_type="query"),
    cohere(
        "`input_type` that the model does not have",
        kinds="embedding with prompts",
        texts=[SENTENCE],
        input_type="search_document",
        reason="Cohere's own values are known for all models",
        status=200,
    ),
    cohere("all `embedding_types`", texts=[SENTENCE], embedding_types=["float", "binary", "ubinary", "base64"]),
    cohere(
        '`embedding_types: ["int8"]`',
        texts=[SENTENCE],
        embedding_types=["int8"],
        reason="Cohere's API has them",
        status=200,
    ),
    cohere("no texts", texts=[]),
    cohere("no fields"),
    cohere("a text that is too long", texts=[LONG_TEXT]),
    cohere(
        '`truncate: "START"`, `max_tokens: 5`',
        texts=[LONG_TEXT],
        truncate="START",
        max_tokens=5,
        reason="keeps the special tokens, as transformers does; vLLM cuts them off",
        differs=("embeddings",),
    ),
    cohere("`max_tokens: 5`", texts=[LONG_TEXT], max_tokens=5),
    cohere('`truncate: "NONE"`', "maximum context length is", texts=[LONG_TEXT], truncate="NONE"),
    cohere('`truncate: "NONE"`, `max_tokens: 3`', "max_tokens", texts=[SENTENCE], truncate="NONE", max_tokens=3),
    cohere('`truncate: "MIDDLE"`', texts=[SENTENCE], truncate="MIDDLE"),
    cohere("`output_dimension: 16`", kinds="matryoshka", texts=[SENTENCE], output_dimension=16),
    cohere(
        "`output_dimension: 16`",
        texts=[SENTENCE],
        output_dimension=16,
        reason="as `dimensions`: any model's vectors can be cut",
        status=200,
    ),
)

CASES: tuple[Case, ...] = (
    post(
        "",
        "/v2/rerank",
        RERANKERS,
        {"query": SENTENCE, "documents": DOCUMENTS},
        reason=NO_DOCUMENTS,
        differs=DOCUMENTS_OF_RESULTS,
    ),
    post(
        "`return_documents: true`",
        "/v2/rerank",
        RERANKERS,
        {"query": SENTENCE, "documents": DOCUMENTS, "return_documents": True},
    ),
    post(
        "`max_tokens_per_doc`, `priority`",
        "/v2/rerank",
        "cross-encoder",
        {"query": SENTENCE, "documents": DOCUMENTS, "max_tokens_per_doc": 3, "priority": 1},
        reason="`max_tokens_per_doc` is cut as Cohere cuts it",
        differs=("results", "usage"),
    ),
    post("", "/rerank", RERANKERS, {"query": SENTENCE, "documents": DOCUMENTS}),
    post(
        "`return_documents: false`",
        "/rerank",
        "cross-encoder",
        {"query": SENTENCE, "documents": DOCUMENTS, "return_documents": False},
        reason="vLLM does not know the field",
        differs=("results.0.document", "results.1.document", "results.2.document"),
    ),
    post(
        "1 to 3",
        "/score",
        "embedding with prompts",
        {"text_1": SENTENCE, "text_2": DOCUMENTS},
        reason="puts the model's prompt for queries in front of them",
        differs=("data", "usage"),
    ),
    post("1 to 3", "/score", RERANKERS, {"text_1": SENTENCE, "text_2": DOCUMENTS}),
    post("1 to 1", "/v1/score", RERANKERS, {"text_1": SENTENCE, "text_2": OTHER}),
    post("3 to 3", "/score", RERANKERS, {"text_1": DOCUMENTS, "text_2": DOCUMENTS}),
    post("", "/classify", ("classifier", "decoder classifier", "cross-encoder"), {"input": [SENTENCE, OTHER]}),
    post("", "/pooling", ("classifier", "decoder classifier", "cross-encoder"), {"input": [SENTENCE, OTHER]}),
    post(
        "tokens",
        "/pooling",
        ("token classifier", "classifier of tokens", "decoder classifier of tokens"),
        {"input": [SENTENCE, "Yes"]},
    ),
    post(
        "tokens, `task`",
        "/pooling",
        ("token classifier", "classifier of tokens", "decoder classifier of tokens"),
        {"input": SENTENCE, "task": "token_classify"},
    ),
    post(
        "tokens, `use_activation: false`",
        "/pooling",
        ("classifier of tokens", "decoder classifier of tokens"),
        {"input": SENTENCE, "use_activation": False},
    ),
    post("token vectors", "/pooling", ("late interaction", "token embeddings"), {"input": [SENTENCE, "Yes"]}),
    post(
        "a sparse vector",
        "/pooling",
        "sparse",
        {"input": SENTENCE},
        reason="the weights that are not 0, as `[{index, value}]`",
        differs=("data.0.data",),
    ),
    post(
        "a text that is too long",
        "/v1/embeddings",
        "embedding in chunks",
        {"input": LONG_TEXT},
        reason="each chunk has special tokens of its own",
        differs=("data", "usage"),
    ),
    post("a text", "/v1/embeddings", "embedding in chunks", {"input": SENTENCE}),
    post("token vectors", "/pooling", "ColBERT", {"input": SENTENCE}, reason=TRAINED, differs=("data", "usage")),
    post(
        "1 to 3",
        "/score",
        "ColBERT",
        {"text_1": SENTENCE, "text_2": DOCUMENTS},
        reason=TRAINED,
        differs=("data", "usage"),
    ),
    get("/load", "embedding"),
    post("`X-Request-Id`", "/v1/embeddings", "embedding", {"input": SENTENCE}, headers=ID),
    post(
        "`X-Request-Id`",
        "/rerank",
        "embedding",
        {"query": "a", "documents": ["b"]},
        headers=ID,
        reason="the id names the route",
        differs=("id",),
    ),
    post("`request_id`", "/v1/embeddings", "embedding", {"input": SENTENCE, "request_id": "abc"}),
    post("`request_id`", "/score", "embedding", {"text_1": "a", "text_2": "b", "request_id": "abc"}),
    *encodings(),
    *COHERE,
)

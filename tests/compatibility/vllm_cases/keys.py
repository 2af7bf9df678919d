"""Line 10: the routes that a key guards, with ``--api-key-scope vllm``, which is what vLLM does."""

from tests.compatibility.vllm_cases.case import NO_DOCUMENTS, SENTENCE, Case, get, post

KIND = "embedding with a key"
KEY = {"Authorization": "Bearer sesame"}
INPUT = {"input": SENTENCE}
GUARDED = (
    ("/v1/embeddings", INPUT),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}),
)
OPEN = (
    ("/pooling", INPUT),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [5]}),
    ("/invocations", INPUT),
)

CASES: tuple[Case, ...] = (
    *(post("no key", path, KIND, body) for path, body in (*GUARDED, *OPEN)),
    *(post("the key", path, KIND, body, headers=KEY) for path, body in (*GUARDED, *OPEN) if path != "/v2/rerank"),
    post(
        "the key",
        "/v2/rerank",
        KIND,
        {"query": "a", "documents": ["b"]},
        headers=KEY,
        reason=NO_DOCUMENTS,
        differs=("results.0.document",),
    ),
    *(
        get(path, KIND, name="no key")
        for path in ("/health", "/ping", "/load", "/metrics", "/v1/models", "/v1/nothing")
    ),
    get("/version", KIND, name="no key", reason="each server has its own version", differs=("version",)),
    get(
        "/v1/models",
        KIND,
        name="the key",
        headers=KEY,
        reason="as without a key",
        differs=("data.0.root", "data.0.permission", "data.0.owned_by", "data.0.parent"),
    ),
    post("another key", "/v1/embeddings", KIND, INPUT, headers={"Authorization": "Bearer wrong"}),
    post("scheme `bearer`", "/v1/embeddings", KIND, INPUT, headers={"Authorization": "bearer sesame"}),
    post("scheme `Basic`", "/v1/embeddings", KIND, INPUT, headers={"Authorization": "Basic sesame"}),
)

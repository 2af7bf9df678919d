"""Line 5: folders without modules.json."""

from tests.compatibility.vllm_cases.case import DOCUMENTS, OTHER, SENTENCE, Case, post

BARE = ("bare BERT", "bare BERT with mean", "bare ModernBERT", "bare decoder")
EMBEDDERS = (*BARE, "embedding", "matryoshka", "chat")

ASSUMED = "mean, not normalised, as in sentence-transformers; `--pooling cls --normalize` does the same as vLLM"

CASES: tuple[Case, ...] = (
    post(
        "texts",
        "/v1/embeddings",
        "bare BERT without flags",
        {"input": [SENTENCE, OTHER]},
        reason=ASSUMED,
        differs=("data",),
    ),
    post("a text", "/v1/embeddings", EMBEDDERS, {"input": SENTENCE}),
    post("texts", "/v1/embeddings", EMBEDDERS, {"input": [SENTENCE, OTHER, "Yes"]}),
    post("token ids", "/v1/embeddings", EMBEDDERS, {"input": [[5, 6, 7], [8, 9]]}),
    post("a text", "/pooling", EMBEDDERS, {"input": SENTENCE}),
    post('`task: "embed"`', "/pooling", EMBEDDERS, {"input": SENTENCE, "task": "embed"}),
    post("texts", "/score", EMBEDDERS, {"text_1": SENTENCE, "text_2": DOCUMENTS}),
    post("the default task", "/pooling", ("token embeddings", "late interaction"), {"input": SENTENCE}),
)

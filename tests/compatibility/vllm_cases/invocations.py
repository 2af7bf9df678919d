"""Line 2: ``/invocations`` finds out from the fields what is wanted."""

from tests.compatibility.vllm_cases.case import DOCUMENTS, OTHER, SENTENCE, USER, Case, post

PATH = "/invocations"
SCORING = ("embedding", "cross-encoder", "late interaction", "generative reranker")
ALL = ("embedding", "cross-encoder", "classifier", "token classifier", "late interaction", "chat")
NO_HANDLER = ("suitable handler",)

CASES: tuple[Case, ...] = (
    post("`input`", PATH, ALL, {"input": SENTENCE}),
    post("`input`, a list", PATH, ("embedding", "classifier"), {"input": [SENTENCE, OTHER]}),
    post("`messages`", PATH, "chat", {"messages": [USER]}),
    post("`messages`, no template", PATH, ("embedding", "classifier"), {"messages": [USER]}, says=("chat template",)),
    post("`query`, `documents`", PATH, SCORING, {"query": SENTENCE, "documents": DOCUMENTS}),
    post("`text_1`, `text_2`", PATH, SCORING, {"text_1": SENTENCE, "text_2": DOCUMENTS}),
    post("`queries`, `documents`", PATH, SCORING, {"queries": SENTENCE, "documents": DOCUMENTS}),
    post("`queries`, `items`", PATH, SCORING, {"queries": SENTENCE, "items": DOCUMENTS}),
    post("`data_1`, `data_2`", PATH, SCORING, {"data_1": SENTENCE, "data_2": OTHER}),
    post(
        "`input` beside `query`, `documents`", PATH, "embedding", {"input": SENTENCE, "query": "a", "documents": ["b"]}
    ),
    post(
        "`input` with another `task`",
        PATH,
        "embedding",
        {"input": SENTENCE, "task": "token_embed"},
        reason="does the requested task, as `/pooling` does",
        differs=("data", "usage"),
    ),
    post("`input` with its main `task`", PATH, "embedding", {"input": SENTENCE, "task": "embed"}),
    post("`query`, `documents`", PATH, "classifier", {"query": SENTENCE, "documents": DOCUMENTS}),
    post("no known field", PATH, ALL, {"foo": 1}, says=NO_HANDLER),
    post("an empty object", PATH, "embedding", {}, says=NO_HANDLER),
    post("a list", PATH, "embedding", []),
    post("truncated JSON", PATH, "embedding", b'{"input": "a', says=("JSON",)),
    post(
        "an unknown `model`",
        PATH,
        "embedding",
        {"input": SENTENCE, "model": "nope"},
        reason="`model` selects one of several models; vLLM ignores it here",
        status=404,
    ),
)

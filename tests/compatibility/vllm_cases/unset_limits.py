"""Line 3: 0 means that a limit is not set."""

from tests.compatibility.vllm_cases.case import (
    DOCUMENTS,
    DOCUMENTS_OF_RESULTS,
    NO_DOCUMENTS,
    SENTENCE,
    Case,
    post,
)

KINDS = ("embedding", "cross-encoder", "late interaction")
RERANK = {"query": SENTENCE, "documents": DOCUMENTS}
SCORE = {"text_1": SENTENCE, "text_2": DOCUMENTS}
NULL = "null is the default"
CUTS_NOTHING = "a limit above the model's maximum cuts nothing by itself"


def limits() -> list[Case]:
    """Return the cases of both limits, which have the same rules."""
    cases = []
    for field in ("max_tokens_per_query", "max_tokens_per_doc"):
        cases += [
            post(f"`{field}: 0`", "/rerank", KINDS, {**RERANK, field: 0}),
            post(f"`{field}: 0`", "/score", KINDS, {**SCORE, field: 0}),
            post(f"`{field}: -1`", "/rerank", KINDS, {**RERANK, field: -1}, says=(field,)),
            post(f"`{field}: 3`", "/rerank", KINDS, {**RERANK, field: 3}),
            post(f"`{field}: 3`", "/score", KINDS, {**SCORE, field: 3}),
            post(f"`{field}: 500`", "/rerank", KINDS, {**RERANK, field: 500}, reason=CUTS_NOTHING, status=200),
            post(f"`{field}: null`", "/rerank", "embedding", {**RERANK, field: None}, reason=NULL, status=200),
        ]
    return cases


CASES: tuple[Case, ...] = (
    post("no `top_n`", "/rerank", KINDS, RERANK),
    post("`top_n: 0`", "/rerank", KINDS, {**RERANK, "top_n": 0}),
    post("`top_n: 0`", "/v1/rerank", "cross-encoder", {**RERANK, "top_n": 0}),
    post(
        "`top_n: 0`",
        "/v2/rerank",
        "cross-encoder",
        {**RERANK, "top_n": 0},
        reason=NO_DOCUMENTS,
        differs=DOCUMENTS_OF_RESULTS,
    ),
    post("`top_n: 1`", "/rerank", KINDS, {**RERANK, "top_n": 1}),
    post("`top_n: 9`", "/rerank", KINDS, {**RERANK, "top_n": 9}),
    post("`top_n: -1`", "/rerank", KINDS, {**RERANK, "top_n": -1}, says=("top_n",)),
    post("`top_n: null`", "/rerank", "embedding", {**RERANK, "top_n": None}, reason=NULL, status=200),
    *limits(),
)

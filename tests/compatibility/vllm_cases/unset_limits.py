"""Line 3: 0 means that a limit is not set."""

from tests.compatibility.vllm_cases.case import DOCUMENTS_OF_RESULTS, NO_DOCUMENTS, Case, rerank, score

KINDS = ("embedding", "cross-encoder", "late interaction")
NULL = "null leaves the field out"
CUTS_NOTHING = "a limit above the model's maximum has no effect"


def limits() -> list[Case]:
    """Return the cases of both limits, which have the same rules."""
    cases = []
    for field in ("max_tokens_per_query", "max_tokens_per_doc"):
        cases += [
            rerank(f"`{field}: 0`", KINDS, **{field: 0}),
            score(f"`{field}: 0`", KINDS, **{field: 0}),
            rerank(f"`{field}: -1`", KINDS, **{field: -1}, says=(field,)),
            rerank(f"`{field}: 3`", KINDS, **{field: 3}),
            score(f"`{field}: 3`", KINDS, **{field: 3}),
            rerank(f"`{field}: 500`", KINDS, **{field: 500}, reason=CUTS_NOTHING, status=200),
            rerank(f"`{field}: null`", "embedding", **{field: None}, reason=NULL, status=200),
        ]
    return cases


CASES: tuple[Case, ...] = (
    rerank("no `top_n`", KINDS),
    rerank("`top_n: 0`", KINDS, top_n=0),
    rerank("`top_n: 0`", "cross-encoder", path="/v1/rerank", top_n=0),
    rerank(
        "`top_n: 0`", "cross-encoder", path="/v2/rerank", top_n=0, reason=NO_DOCUMENTS, differs=DOCUMENTS_OF_RESULTS
    ),
    rerank("`top_n: 1`", KINDS, top_n=1),
    rerank("`top_n: 9`", KINDS, top_n=9),
    rerank("`top_n: -1`", KINDS, top_n=-1, says=("top_n",)),
    rerank("`top_n: null`", "embedding", top_n=None, reason=NULL, status=200),
    *limits(),
)

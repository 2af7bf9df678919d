"""Line 4: ``use_activation`` says whether vectors are normalised, and whether logits become probabilities."""

from tests.compatibility.vllm_cases.case import RERANK, SCORE, SENTENCE, Case, post

EMBEDDERS = ("embedding", "bare BERT", "bare BERT with mean", "bare decoder", "chat")
CLASSIFIERS = ("cross-encoder", "classifier", "decoder classifier")
TOKENS = ("late interaction", "token embeddings", "token classifier")
RERANKERS = ("embedding", "cross-encoder", "generative reranker")
LATE_INTERACTION = "late interaction"
PAIRS = {"/score": SCORE, "/rerank": RERANK}
OWN = "`normalize` is a field of this server"


def each_value() -> list[Case]:
    """Return the cases of true, false and null."""
    cases = []
    for spelt, value in (("true", True), ("false", False), ("null", None)):
        name, field = f"`use_activation: {spelt}`", {"use_activation": value}
        cases += [
            post(name, "/v1/embeddings", EMBEDDERS, {"input": SENTENCE, **field}),
            post(name, "/pooling", (*EMBEDDERS, *CLASSIFIERS, *TOKENS), {"input": SENTENCE, **field}),
            post(name, "/classify", CLASSIFIERS, {"input": SENTENCE, **field}),
        ]
        for path, body in PAIRS.items():
            kinds = RERANKERS if value is False else (*RERANKERS, LATE_INTERACTION)
            cases.append(post(name, path, kinds, {**body, **field}))
    return cases


CASES: tuple[Case, ...] = (
    *each_value(),
    *(
        post(
            "`use_activation: false`",
            path,
            LATE_INTERACTION,
            {**body, "use_activation": False},
            reason="the model's files define the score, which has no activation",
            differs=("data", "results"),
        )
        for path, body in PAIRS.items()
    ),
    post(
        '`use_activation: "no"`',
        "/v1/embeddings",
        "embedding",
        {"input": SENTENCE, "use_activation": "no"},
        reason="only the strings `true`, `false`, `1` and `0` are truth values",
        status=400,
    ),
    post('`use_activation: "False"`', "/v1/embeddings", "embedding", {"input": SENTENCE, "use_activation": "False"}),
    post(
        "`normalize: false`",
        "/v1/embeddings",
        "embedding",
        {"input": SENTENCE, "normalize": False},
        reason=OWN,
        status=200,
    ),
    post(
        "`normalize: false`", "/pooling", "embedding", {"input": SENTENCE, "normalize": False}, reason=OWN, status=200
    ),
)

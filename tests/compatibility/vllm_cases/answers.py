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
    embed,
    get,
    post,
    post_fields,
    rerank,
    score,
)

RERANKERS = ("embedding", "cross-encoder", "late interaction", "generative reranker")
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
TRAINED = "adds the markers of queries and documents, and a query's mask tokens, as the model was trained"
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
    fields = {"input": SENTENCE, "embed_dtype": "fp8_e4m3", "use_activation": False}
    in_base64 = {**fields, "encoding_format": "base64"}
    its_own = "numbers are rounded to the type"
    return [
        *cases,
        post("`fp8_e4m3`, `float`", "/v1/embeddings", "embedding", fields, reason=its_own, differs=("data",)),
        post("`fp8_e4m3`, not normalised", "/v1/embeddings", "embedding", in_base64),
        post("`fp8_e4m3`, `base64`", "/pooling", ("classifier", "token classifier"), in_base64),
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
        reason="every model accepts Cohere's own values",
        status=200,
    ),
    cohere("all `embedding_types`", texts=[SENTENCE], embedding_types=["float", "binary", "ubinary", "base64"]),
    cohere(
        '`embedding_types: ["int8"]`',
        texts=[SENTENCE],
        embedding_types=["int8"],
        reason="Cohere's API offers these types",
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
        reason="keeps the special tokens, as transformers does; vLLM removes them",
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
        reason="as `dimensions`: every model's vectors can be truncated",
        status=200,
    ),
)

OF_TOKENS = ("token classifier", "classifier of tokens", "decoder classifier of tokens")
CLASSIFIERS = ("classifier", "decoder classifier", "cross-encoder")
UNKNOWN_TO_VLLM = {"reason": "vLLM does not know the field", "differs": DOCUMENTS_OF_RESULTS}
SPARSE = "returns the non-zero weights, as `[{index, value}]`"
OTHER_DATA = ("data", "usage")


def pool(name: str, kinds: str | tuple[str, ...], **fields: Any) -> Case:
    return post_fields(name, "/pooling", kinds, **{"input": SENTENCE, **fields})


CASES: tuple[Case, ...] = (
    rerank("", RERANKERS, path="/v2/rerank", reason=NO_DOCUMENTS, differs=DOCUMENTS_OF_RESULTS),
    rerank("`return_documents: true`", RERANKERS, path="/v2/rerank", return_documents=True),
    rerank(
        "`max_tokens_per_doc`, `priority`",
        "cross-encoder",
        path="/v2/rerank",
        max_tokens_per_doc=3,
        priority=1,
        reason="`max_tokens_per_doc` truncates as in Cohere's API",
        differs=("results", "usage"),
    ),
    rerank("", RERANKERS),
    rerank("`return_documents: false`", "cross-encoder", return_documents=False, **UNKNOWN_TO_VLLM),
    score(
        "1 to 3",
        "embedding with prompts",
        reason="puts the model's query prompt in front of queries",
        differs=OTHER_DATA,
    ),
    score("1 to 3", RERANKERS),
    score("1 to 1", RERANKERS, path="/v1/score", text_2=OTHER),
    score("3 to 3", RERANKERS, text_1=DOCUMENTS),
    post("", "/classify", CLASSIFIERS, {"input": [SENTENCE, OTHER]}),
    pool("", CLASSIFIERS, input=[SENTENCE, OTHER]),
    pool("tokens", OF_TOKENS, input=[SENTENCE, "Yes"]),
    pool("tokens, `task`", OF_TOKENS, task="token_classify"),
    pool("tokens, `use_activation: false`", OF_TOKENS[1:], use_activation=False),
    pool("token vectors", ("late interaction", "token embeddings"), input=[SENTENCE, "Yes"]),
    pool("a sparse vector", "sparse", reason=SPARSE, differs=("data.0.data",)),
    embed(
        "a text that is too long",
        "embedding in chunks",
        input=LONG_TEXT,
        reason="each window has its own special tokens",
        differs=OTHER_DATA,
    ),
    embed("a text", "embedding in chunks"),
    pool("token vectors", "ColBERT", reason=TRAINED, differs=OTHER_DATA),
    score("1 to 3", "ColBERT", reason=TRAINED, differs=OTHER_DATA),
    get("/load", "embedding"),
    embed("`X-Request-Id`", headers=ID),
    post_fields(
        "`X-Request-Id`",
        "/rerank",
        "embedding",
        query="a",
        documents=["b"],
        headers=ID,
        reason="the id begins with the route's name",
        differs=("id",),
    ),
    embed("`request_id`", request_id="abc"),
    post_fields("`request_id`", "/score", "embedding", text_1="a", text_2="b", request_id="abc"),
    *encodings(),
    *COHERE,
)

"""Line 9: what is accepted although it is not quite as documented."""

from tests.compatibility.vllm_cases.case import OTHER, SENTENCE, Case, embed, get, post

PADDED = "vLLM attends to the padding, which changes the vector; this server never does"


CASES: tuple[Case, ...] = (
    post(
        "`documents`, a text",
        "/rerank",
        ("embedding", "cross-encoder", "late interaction"),
        {"query": SENTENCE, "documents": OTHER},
    ),
    post(
        "`queries` and `documents`, texts",
        "/score",
        ("embedding", "cross-encoder"),
        {"queries": SENTENCE, "documents": OTHER},
    ),
    post('`top_n: "1"`', "/rerank", "cross-encoder", {"query": SENTENCE, "documents": [OTHER, "Yes"], "top_n": "1"}),
    post("`top_n: 1.0`", "/rerank", "cross-encoder", {"query": SENTENCE, "documents": [OTHER, "Yes"], "top_n": 1.0}),
    post(
        '`max_tokens_per_doc: "3"`',
        "/rerank",
        "embedding",
        {"query": SENTENCE, "documents": [OTHER, "Yes"], "max_tokens_per_doc": "3"},
    ),
    embed('`truncate_prompt_tokens: "5"`', truncate_prompt_tokens="5"),
    embed('`priority: "1"`', priority="1"),
    embed('`dimensions: "16"`', "matryoshka", dimensions="16"),
    embed('`use_activation: "false"`', use_activation="false"),
    embed('`use_activation: "true"`', use_activation="true"),
    embed("`use_activation: 0`", use_activation=0),
    embed('`add_special_tokens: "false"`', add_special_tokens="false"),
    post('`return_token_strs: "true"`', "/tokenize", "embedding", {"prompt": SENTENCE, "return_token_strs": "true"}),
    embed('`model: ""`', model=""),
    embed("`model: null`", model=None),
    embed('`input: ["1"]`', input=["1"]),
    embed("`input: [true]`", input=[True], reason="true is not a token id", status=400),
    embed("unknown fields", colour="red"),
    embed("`cache_salt`", cache_salt="salt"),
    embed("`mm_processor_kwargs: {}`", mm_processor_kwargs={}),
    embed("`user`", user="me"),
    embed('`padding: "do_not_pad"`', padding="do_not_pad"),
    embed(
        '`padding: "max_length"`',
        ("embedding", "bare decoder"),
        padding="max_length",
        reason=PADDED,
        status=200,
        differs=("data", "usage"),
    ),
    embed("`late_chunking_params`", late_chunking_params={}),
    embed("`late_chunking: true`", late_chunking=True),
    embed("2100 inputs", input=["Yes"] * 2100, reason="2048 is the default of `--max-inputs-per-request`", status=400),
    post("a byte order mark", "/v1/embeddings", "embedding", b'\xef\xbb\xbf{"input": "Yes"}'),
    post("the same field twice", "/v1/embeddings", "embedding", b'{"input": "No", "input": "Yes"}'),
    post("truncated JSON", "/v1/embeddings", "embedding", b'{"input": "Yes"', says=("JSON",)),
    post("more after the JSON", "/v1/embeddings", "embedding", b'{"input": "Yes"}}', says=("JSON",)),
    post(
        "`charset=utf-8`",
        "/v1/embeddings",
        "embedding",
        b'{"input": "Yes"}',
        headers={"content-type": "application/json; charset=utf-8"},
    ),
    post("", "/v1/embeddings/", "embedding", {"input": SENTENCE}),
    post("", "/rerank/", "embedding", {"query": SENTENCE, "documents": [OTHER]}),
    post("", "/invocations/", "embedding", {"input": SENTENCE}),
    get("/health/", "embedding"),
)

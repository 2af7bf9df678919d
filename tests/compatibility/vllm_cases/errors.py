"""Line 7: requests that are refused."""

from typing import Any

from tests.compatibility.vllm_cases.case import LONG_TEXT, SENTENCE, Case, post, post_fields, rerank, score

EMBEDDERS = ("embedding", "bare decoder")
CLASSIFIERS = ("classifier", "cross-encoder")
LABELLERS = ("classifier", "token classifier")
SCORERS = ("embedding", "cross-encoder")
TOKEN_MODELS = ("token classifier", "late interaction")
LENGTHS_OF_SIDES = "Input lengths must be either 1:1, 1:N or N:N"
AT_ONCE = "all tasks of a model are served at once"
TOO_LONG = ("maximum context length", "Please reduce the length of the input")
ANY_LENGTH = "every model's vectors can be truncated; few models declare the trained lengths"
SHARED = "the route exists, because another model may have the task"


def embed(name: str, *says: str, kinds: str | tuple[str, ...] = "embedding", **body: Any) -> Case:
    return post_fields(name, "/v1/embeddings", kinds, says=says, **body)


def pool(name: str, kinds: str | tuple[str, ...], *says: str, **body: Any) -> Case:
    return post_fields(name, "/pooling", kinds, says=says, input=SENTENCE, **body)


BYTES_OR_NUMBERS = "be 'float', 'base64', 'bytes' or 'bytes_only'"
"""What both servers accept as ``encoding_format``, as both say it."""

LENGTHS = (
    embed("a text that is too long", *TOO_LONG, kinds=EMBEDDERS, input=LONG_TEXT),
    embed(
        "20 000 letters that are one unknown word",
        input="a" * 20_000,
        reason="the text has three tokens; vLLM counts characters first",
        status=200,
    ),
    embed("55 token ids", *TOO_LONG, kinds=EMBEDDERS, input=[7] * 55),
    post("a text that is too long", "/classify", CLASSIFIERS, {"input": LONG_TEXT}, says=TOO_LONG),
    post("a text that is too long", "/pooling", TOKEN_MODELS, {"input": LONG_TEXT}, says=TOO_LONG),
    score("a document that is too long", SCORERS, text_2=LONG_TEXT, says=TOO_LONG),
    rerank("a document that is too long", SCORERS, documents=[LONG_TEXT], says=TOO_LONG),
    embed("`truncate_prompt_tokens: 5`", kinds=EMBEDDERS, input=LONG_TEXT, truncate_prompt_tokens=5),
    embed("`truncate_prompt_tokens: -1`", kinds=EMBEDDERS, input=LONG_TEXT, truncate_prompt_tokens=-1),
    embed(
        "`truncate_prompt_tokens: 500`",
        "truncate_prompt_tokens",
        "Please request a smaller truncation size",
        input=LONG_TEXT,
        truncate_prompt_tokens=500,
    ),
    embed("`truncate_prompt_tokens: -2`", "truncate_prompt_tokens", input=SENTENCE, truncate_prompt_tokens=-2),
    embed("`truncate_prompt_tokens: 0`", input=SENTENCE, truncate_prompt_tokens=0),
    embed(
        '`truncation_side: "left"`',
        input=LONG_TEXT,
        truncate_prompt_tokens=5,
        truncation_side="left",
        reason="keeps the special tokens, as transformers does; vLLM removes them",
        differs=("data",),
    ),
    rerank("`truncate_prompt_tokens: 8`", "cross-encoder", truncate_prompt_tokens=8),
)

VALUES = (
    embed('`encoding_format: "hex"`', "encoding_format", BYTES_OR_NUMBERS, input=SENTENCE, encoding_format="hex"),
    embed(
        '`embed_dtype: "int4"`',
        "embed_dtype",
        "be 'float32', 'float16', 'bfloat16', 'fp8_e4m3'",
        input=SENTENCE,
        embed_dtype="int4",
    ),
    embed('`endianness: "middle"`', "endianness", "be 'native', '", input=SENTENCE, endianness="middle"),
    embed(
        '`truncation_side: "middle"`',
        "truncation_side",
        "be 'left' or 'right'",
        input=SENTENCE,
        truncation_side="middle",
    ),
    embed(
        '`padding: "longest"`',
        input=SENTENCE,
        padding="longest",
        reason="a value of transformers' tokenizers, which changes nothing",
        status=200,
    ),
    pool('`task: "foo"`', "embedding", "task", "be 'embed', '", task="foo"),
    pool('`encoding_format: "hex"`', "token classifier", "encoding_format", BYTES_OR_NUMBERS, encoding_format="hex"),
    embed(
        "`encoding_format: null`",
        input=SENTENCE,
        encoding_format=None,
        reason="null leaves the field out",
        status=200,
    ),
    embed(
        "`request_id: null`",
        input=SENTENCE,
        request_id=None,
        reason="null leaves the field out",
        status=200,
    ),
    embed("`priority: 1.5`", input=SENTENCE, priority=1.5),
    embed("`user: 5`", "user", input=SENTENCE, user=5),
    embed("`dimensions: 16`", kinds=EMBEDDERS, input=SENTENCE, dimensions=16, reason=ANY_LENGTH, status=200),
    embed("`dimensions: 16`", kinds="matryoshka", input=SENTENCE, dimensions=16),
    embed(
        "`dimensions: 17`",
        kinds="matryoshka",
        input=SENTENCE,
        dimensions=17,
        reason="accepts any length up to the model's own, as in sentence-transformers",
        status=200,
    ),
    embed("`dimensions: 0`", "dimensions", kinds="matryoshka", input=SENTENCE, dimensions=0),
    embed("`dimensions: 65`", "dimensions", kinds="matryoshka", input=SENTENCE, dimensions=65),
    pool("`dimensions: 16`", ("embedding", "matryoshka"), dimensions=16, reason="as on `/v1/embeddings`", status=200),
    pool("`dimensions: 2`", "classifier", "dimensions", dimensions=2),
)

TASK_ERRORS = (
    pool(
        '`task: "classify"`',
        ("embedding", "late interaction", "token classifier"),
        "Unsupported task: 'classify'",
        "Supported tasks",
        task="classify",
    ),
    pool(
        '`task: "embed"`',
        ("classifier", "cross-encoder", "token classifier"),
        "Unsupported task: 'embed'",
        "Supported tasks",
        task="embed",
    ),
    pool('`task: "token_embed"`', "embedding", task="token_embed", reason=AT_ONCE, status=200),
    pool('`task: "token_classify"`', "classifier", task="token_classify", reason=AT_ONCE, status=200),
    pool('`task: "score"`', ("embedding", "cross-encoder"), "score", task="score"),
    pool('`task: "encode"`', "embedding", "encode", task="encode"),
    pool('`task: "plugin"`', "embedding", task="plugin"),
    post("a model without the task", "/classify", "embedding", {"input": SENTENCE}, reason=SHARED, status=400),
    post("a model without the task", "/v1/embeddings", CLASSIFIERS, {"input": SENTENCE}, reason=SHARED, status=400),
    post("a model without the task", "/v2/embed", "classifier", {"texts": [SENTENCE]}, reason=SHARED, status=400),
    score("a model without the task", LABELLERS, text_2="Yes", reason=SHARED, status=400),
    rerank("a model without the task", LABELLERS, documents=["Yes"], reason=SHARED, status=400),
)

EMPTY = (
    embed("no inputs", input=[]),
    embed("an empty text", kinds=("embedding", "bare ModernBERT"), input=""),
    embed("an empty text in a list", input=[""]),
    embed("a list of no token ids", input=[[]]),
    post("no inputs", "/classify", "classifier", {"input": []}),
    rerank("no documents", SCORERS, documents=[]),
    score("no queries", "cross-encoder", text_1=[], text_2=["Yes"], says=("At least one text element must be given",)),
    score("2 and 3 texts", SCORERS, text_1=["a", "b"], text_2=["a", "b", "c"], says=(LENGTHS_OF_SIDES,)),
    rerank("an empty query", SCORERS, query="", documents=["Yes"]),
)

JSON = (
    embed("no fields", "input"),
    post("no `documents`", "/rerank", "embedding", {"query": SENTENCE}, says=("documents",)),
    post("no `query`", "/rerank", "embedding", {"documents": ["Yes"]}, says=("query",)),
    post("no `text_2`", "/score", "embedding", {"text_1": SENTENCE}, says=("text_2",)),
    embed("`input: 5`", "input", input=5),
    embed("`input: null`", input=None),
    embed("`input` of a text and a number", input=["a", 5]),
    embed("`input`, an object", input={"a": 1}),
    embed("an id that the model does not have", "99999", "vocabulary", input=[99999]),
    embed("a negative id", input=[-1]),
    post("`query`, a list", "/rerank", "embedding", {"query": ["a"], "documents": ["b"]}),
    post("`documents`, numbers", "/rerank", "embedding", {"query": "a", "documents": [1]}),
    post("not JSON", "/v1/embeddings", "embedding", b"nope", says=("JSON",)),
    post("no body", "/v1/embeddings", "embedding", b""),
    post("`null`", "/v1/embeddings", "embedding", b"null"),
    post("a list", "/v1/embeddings", "embedding", b"[]"),
    post("bytes that are not UTF-8", "/v1/embeddings", "embedding", b'{"input": "\xff"}'),
    post(
        "`content-type: text/plain`",
        "/v1/embeddings",
        "embedding",
        b'{"input": "a"}',
        headers={"content-type": "text/plain"},
        says=("application/json",),
        reason="HTTP's status for this error",
        status=415,
    ),
    *(
        post_fields(
            "an unknown model", path, "embedding", **body, model="nope", says=("The model `nope` does not exist.",)
        )
        for path, body in (
            ("/v1/embeddings", {"input": SENTENCE}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/pooling", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
        )
    ),
)

CASES: tuple[Case, ...] = (*LENGTHS, *VALUES, *TASK_ERRORS, *EMPTY, *JSON)

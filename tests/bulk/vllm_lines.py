"""Lines that vLLM's ``run-batch`` and this package's are compared on, by the kind of model."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

TEXT = "Who owns a task?"
DOCUMENTS = ["A nursery owns its tasks.", "A thread has no owner."]
LONG = "word " * 500


def line(custom_id: str, url: str, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {"model": "m", **body}})


def lines_of(named: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    for name, (url, body) in named.items():
        yield name, line(name, url, **body)


EMBEDDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/v1/embeddings", {"input": TEXT}),
    "texts": ("/v1/embeddings", {"input": DOCUMENTS}),
    "token ids": ("/v1/embeddings", {"input": [5, 6, 7]}),
    "base64": ("/v1/embeddings", {"input": TEXT, "encoding_format": "base64"}),
    "bytes": ("/v1/embeddings", {"input": TEXT, "encoding_format": "bytes"}),
    "an unknown field": ("/v1/embeddings", {"input": TEXT, "mystery": 1}),
    "no model": ("/v1/embeddings", {"input": TEXT, "model": None}),
    "a conversation": ("/v1/embeddings", {"messages": [{"role": "user", "content": TEXT}]}),
    "stream": ("/v1/embeddings", {"input": TEXT, "stream": True}),
    "too long": ("/v1/embeddings", {"input": LONG}),
    "too long and truncated": ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": -1}),
    "dimensions": ("/v1/embeddings", {"input": TEXT, "dimensions": 8}),
    "another model": ("/v1/embeddings", {"input": TEXT, "model": "other"}),
    "an empty list": ("/v1/embeddings", {"input": []}),
    "a token id that does not exist": ("/v1/embeddings", {"input": [99999999]}),
    "an unknown url": ("/v1/mystery", {"input": TEXT}),
    "a relative url": ("v1/embeddings", {"input": TEXT}),
    "completions": ("/v1/completions", {"prompt": TEXT, "input": TEXT}),
    "pooling": ("/pooling", {"input": TEXT}),
    "classify": ("/classify", {"input": TEXT}),
    "sparse of TEI": ("/embed_sparse", {"inputs": TEXT, "input": TEXT}),
}

SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"score {url}": (url, {"text_1": TEXT, "text_2": DOCUMENTS}) for url in ("/score", "/v1/score", "/v3/score")},
    **{
        f"rerank {url}": (url, {"query": TEXT, "documents": DOCUMENTS, "top_n": 1})
        for url in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    "a score of a text that is too long": ("/score", {"text_1": TEXT, "text_2": LONG}),
    "a score for another model": ("/score", {"text_1": TEXT, "text_2": TEXT, "model": "other"}),
}

LINES: Mapping[str, Mapping[str, str]] = {
    "embedding": {
        **dict(lines_of(EMBEDDINGS)),
        **dict(lines_of(SCORES)),
        "a custom_id twice": line("a text", "/v1/embeddings", input="the second"),
        "an empty custom_id": line("", "/v1/embeddings", input=TEXT),
        "a long custom_id": line("x" * 600, "/v1/embeddings", input=TEXT),
        "GET": line("GET", "/v1/embeddings", method="GET", input=TEXT),
        "a field beside the body": line("extra", "/v1/embeddings", input=TEXT).removesuffix("}") + ', "more": 1}',
        "spaces around": "  " + line("spaces", "/v1/embeddings", input=TEXT) + " \t",
        "other letters": line("héllo ☃", "/v1/embeddings", input="ñandú ☃"),
        "not JSON": '{"custom_id": "cut", "method": "POST"',
        "not an object": '["POST"]',
        "no custom_id": '{"method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}',
        "a custom_id of another type": '{"custom_id": 5, "method": "POST", "url": "/score", "body": {"input": "a"}}',
        "no method": '{"custom_id": "m", "url": "/v1/embeddings", "body": {"input": "a"}}',
        "no url": '{"custom_id": "u", "method": "POST", "body": {"input": "a"}}',
        "no body": '{"custom_id": "b", "method": "POST", "url": "/v1/embeddings"}',
        "a body of another type": '{"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": [1]}',
        "an input of another type": line("input", "/v1/embeddings", input=5),
        "no input": line("none", "/v1/embeddings"),
        "a number for dimensions": line("dimensions", "/v1/embeddings", input=TEXT, dimensions="many"),
        "no documents": line("documents", "/rerank", query=TEXT),
    },
    "cross-encoder": {
        **dict(lines_of(SCORES)),
        "embeddings of a scorer": line("embeddings", "/v1/embeddings", input=TEXT),
        "classify": line("classify", "/classify", input=TEXT),
    },
    "classifier": {
        "classify": line("classify", "/classify", input=TEXT),
        "pooling": line("pooling", "/pooling", input=TEXT),
        "embeddings of a classifier": line("embeddings", "/v1/embeddings", input=TEXT),
        "a score of a classifier": line("score", "/score", text_1=TEXT, text_2=TEXT),
    },
}

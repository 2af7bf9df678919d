"""For each field of each request: a body in which it has an effect, or why it has none there."""

import base64
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from tests.model_folders import numpy_file
from tests.tensors import WIDTH

LONG = " ".join(f"w{n}" for n in range(600))

USER = [{"role": "user", "content": "hello"}]
CHAT = {"messages": USER, "input": None, "prompt": None}
WITH_TEMPLATE = {**CHAT, "chat_template": "{{ word }} {{ tools }} {{ messages[0].content }}"}
EMBEDS = base64.b64encode(numpy_file(np.ones((3, WIDTH), dtype=np.float32))).decode()


@attrs.frozen
class Case:
    """A value that changes the answer; the bodies with and without it both have the fields ``beside``.

    A value that is ``refused`` changes the status: the model, or the rest of the body, leaves the field nothing to do.
    """

    value: Any
    beside: Mapping[str, Any] = attrs.Factory(dict)
    refused: bool = False


OPTIONS: Mapping[str, Any] = {
    "model": Case("another", refused=True),
    "priority": 5,
    "request_id": "mine",
    "prompt_name": "query",
    "truncate_prompt_tokens": 3,
    "truncation_side": Case("left", {"truncate_prompt_tokens": 3}),
    "padding": True,
    "activation": False,
    "use_activation": False,
    "raw_scores": True,
    "add_special_tokens": False,
}

CONVERSATIONS: Mapping[str, Any] = {
    "messages": Case(USER, {"input": None, "prompt": None}),
    "chat_template": Case("w1", CHAT),
    "chat_template_kwargs": Case({"word": "w1"}, WITH_TEMPLATE),
    "add_generation_prompt": Case(True, CHAT),
    "continue_final_message": Case(True, CHAT),
}

EMBEDDINGS: Mapping[str, Any] = {
    **OPTIONS,
    **CONVERSATIONS,
    "input": "w9",
    "prompt_embeds": Case(EMBEDS, {"input": None}),
    "encoding_format": "base64",
    "embed_dtype": "int8",
    "endianness": Case("big", {"encoding_format": "base64"}),
    "dimensions": 3,
    "prompt": "w1 ",
    "normalize": False,
    "stream": True,
    "late_chunking": Case(True, {"input": ["hello ", "w1"]}),
    "chunks": [[0, 5]],
    "modality": Case("image", refused=True),
}

SCORES: Mapping[str, Any] = {
    **OPTIONS,
    "max_tokens_per_query": 1,
    "max_tokens_per_doc": 1,
    "instruction": "w5 ",
    "chat_template_kwargs": {"instruction": "w5 "},
    "query": "w9",
    "documents": ["w9"],
    "top_n": 1,
    "return_documents": False,
}

JINA: Mapping[str, Any] = {
    "task": "code.query",
    "embedding_type": "binary",
    "normalized": False,
    "truncate": Case("START", {"input": LONG}),
}

COHERE_EMBED: Mapping[str, Any] = {
    **OPTIONS,
    "texts": ["w9"],
    "inputs": Case([{"content": "hello"}], {"texts": None}),
    "images": Case(["data:image/png;base64,AAAA"], {"texts": None}, refused=True),
    "input_type": "search_query",
    "output_dimension": 3,
    "embedding_types": ["int8"],
    "truncate": Case("START", {"texts": [LONG]}),
    "max_tokens": 3,
}

TEI: Mapping[str, Any] = {
    **OPTIONS,
    "inputs": "w9",
    "normalize": False,
    "dimensions": 3,
    "truncate": Case(False, {"inputs": LONG}, refused=True),
    "truncation_direction": Case("Left", {"inputs": LONG}),
    "query": "w9",
    "texts": ["w9"],
    "return_text": True,
    "top_n": 1,
}

LONG_TEXTS: Mapping[str, Any] = {
    "truncate": Case(False, {"texts": [LONG]}, refused=True),
    "truncation_direction": Case("Left", {"texts": [LONG]}),
}

OLLAMA: Mapping[str, Any] = {**OPTIONS, "options": {"num_ctx": 3}, "keep_alive": "5m"}

MODEL = "only"
"""A name of the model."""

TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello w1 w2 w3"]}

RANKED = {"inputs": None, "query": "hello", "texts": ["w1", "w2 w3"]}

TEXT = "hello w1 w2 w3"
RERANK: Mapping[str, Any] = {"query": "hello w1", "documents": ["w1 w2 w3", "w4"]}

ROUTES: Mapping[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    ("openai", "/v1/embeddings"): ({"input": TEXT}, EMBEDDINGS),
    ("jina", "/v1/embeddings"): ({"input": TEXT, "task": None}, {**EMBEDDINGS, **JINA}),
    ("voyage", "/v1/embeddings"): (
        {"input": TEXT, "input_type": None},
        {
            **EMBEDDINGS,
            **JINA,
            "input_type": "query",
            "output_dtype": "int8",
            "output_dimension": 3,
            "truncation": Case(True, {"input": LONG}),
        },
    ),
    ("voyage", "/v1/rerank"): (
        {**RERANK, "top_k": None},
        {
            **SCORES,
            "return_documents": True,
            "top_k": 1,
            "truncation": Case(False, {"documents": [LONG]}, refused=True),
        },
    ),
    ("voyage", "/v1/multimodalembeddings"): (
        {"inputs": [{"content": TEXT}]},
        {
            "inputs": [{"content": "w9"}],
            "model": OPTIONS["model"],
            "input_type": "query",
            "truncation": Case(False, {"inputs": [{"content": LONG}]}, refused=True),
            "output_dtype": "int8",
            "output_dimension": 3,
            "output_encoding": "base64",
            "encoding_format": "base64",
        },
    ),
    ("vllm", "/pooling"): (
        {"input": TEXT, "task": "embed"},
        {
            **EMBEDDINGS,
            "task": "token_embed",
            "tasks": Case(["embed", "classify"], {"task": None}),
            "input_type": "query",
            "token_pooling": Case(2, {"task": "token_embed"}, refused=True),
            "max_active_dims": Case(1, {"task": "sparse_embed"}),
        },
    ),
    ("vllm", "/classify"): ({"input": TEXT}, {**EMBEDDINGS, "task": Case("embed", refused=True)}),
    ("vllm", "/score"): (
        {"text_1": "hello w1", "text_2": "w1 w2 w3"},
        {
            **SCORES,
            "text_1": "w9",
            "text_2": "w9",
            "queries": Case("w9", {"text_1": None, "text_2": None, "documents": "w1"}),
            "documents": Case("w9", {"text_1": None, "text_2": None, "queries": "w1"}),
            "items": Case("w9", {"text_1": None, "text_2": None, "queries": "w1"}),
            "data_1": Case("w9", {"text_1": None, "text_2": None, "data_2": "w1"}),
            "data_2": Case("w9", {"text_1": None, "text_2": None, "data_1": "w1"}),
        },
    ),
    ("vllm", "/rerank"): (RERANK, SCORES),
    ("vllm", "/v1/rerank"): (RERANK, SCORES),
    ("vllm", "/tokenize"): (
        {"prompt": TEXT},
        {
            **OPTIONS,
            **CONVERSATIONS,
            "add_generation_prompt": Case(False, CHAT),
            "prompt": "w9",
            "tools": Case([{"type": "w1"}], WITH_TEMPLATE),
            "return_token_strs": True,
            "input_type": "query",
        },
    ),
    ("vllm", "/detokenize"): ({"tokens": [5, 6]}, {**OPTIONS, "tokens": [7]}),
    ("cohere", "/v2/embed"): ({"texts": [TEXT]}, COHERE_EMBED),
    ("cohere", "/v1/embed"): ({"texts": [TEXT]}, COHERE_EMBED),
    ("cohere", "/v2/rerank"): (RERANK, {**SCORES, "return_documents": True}),
    ("cohere", "/v1/classify"): (
        {"inputs": [TEXT]},
        {**OPTIONS, "inputs": ["w9"], "truncate": Case("START", {"inputs": [LONG]})},
    ),
    ("cohere", "/v1/tokenize"): ({"text": TEXT}, {**OPTIONS, "text": "w9"}),
    ("cohere", "/v1/detokenize"): ({"tokens": [5, 6]}, {**OPTIONS, "tokens": [7]}),
    ("tei", "/embed"): ({"inputs": TEXT}, TEI),
    ("tei", "/embed_all"): ({"inputs": TEXT}, {**TEI, "token_pooling": Case(2, refused=True)}),
    ("tei", "/embed_sparse"): ({"inputs": TEXT}, {**TEI, "max_active_dims": 1}),
    ("tei", "/predict"): ({"inputs": TEXT}, TEI),
    ("tei", "/rerank"): ({"query": "hello", "texts": ["w1 w2 w3", "w4"]}, {**TEI, **LONG_TEXTS}),
    ("tei", "/similarity"): (
        {"inputs": {"source_sentence": TEXT, "sentences": ["w1"]}},
        {**OPTIONS, "inputs": {"source_sentence": "w9", "sentences": ["w1"]}, "parameters": {"prompt_name": "query"}},
    ),
    ("tei", "/tokenize"): ({"inputs": TEXT}, TEI),
    ("tei", "/decode"): ({"ids": [2, 5, 6]}, {**OPTIONS, "ids": [[7]], "skip_special_tokens": False}),
    ("tei", "/"): (
        {"inputs": TEXT},
        {
            **TEI,
            "query": Case("w9", RANKED),
            "texts": Case(["w9"], RANKED),
            "raw_scores": Case(True, RANKED),
            "return_text": Case(True, RANKED),
            "top_n": Case(1, RANKED),
            "top_k": Case(1, refused=True),
            "parameters": {"prompt_name": "query"},
        },
    ),
    ("ollama", "/api/embed"): (
        {"model": MODEL, "input": TEXT},
        {
            **OLLAMA,
            "input": "w9",
            "truncate": Case(False, {"input": LONG}, refused=True),
            "dimensions": 3,
        },
    ),
    ("ollama", "/api/embeddings"): ({"model": MODEL, "prompt": TEXT}, {**OLLAMA, "prompt": "w9"}),
    ("ollama", "/api/rerank"): (
        {"model": MODEL, **RERANK},
        {**OLLAMA, "options": {"num_ctx": 4}, "query": "w9", "documents": ["w9"], "top_n": 1},
    ),
    ("nim", "/v1/ranking"): (
        {"query": {"text": "hello w1"}, "passages": [{"text": "w1 w2 w3"}, {"text": "w4"}]},
        {
            **OPTIONS,
            "query": {"text": "w9"},
            "passages": [{"text": "w9"}],
            "truncate": Case("END", {"passages": [{"text": LONG}]}),
            "top_k": 1,
        },
    ),
    ("weaviate", "/vectors"): ({"text": TEXT}, {**OPTIONS, "text": "w9", "config": {"task_type": "query"}}),
    ("weaviate", "/rerank"): ({**RERANK, "property": ""}, {**OPTIONS, "query": "w9", "documents": ["w9"]}),
    ("elasticsearch", "/elasticsearch/rerank"): (
        RERANK,
        {**OPTIONS, "query": "w9", "documents": ["w9"], "top_n": 1, "return_documents": True},
    ),
    ("open_inference", "/v2/models/{name}/infer"): (
        {"inputs": [TENSOR]},
        {
            **OPTIONS,
            "inputs": [{**TENSOR, "data": ["w9"]}],
            "id": "mine",
            "outputs": Case([{"name": "score"}], refused=True),
            "parameters": Case({"truncate": True}, {"inputs": [{**TENSOR, "data": [LONG]}]}),
        },
    ),
}
"""By dialect and path: a body, and values that change what is answered to it, or what the model is asked for."""

UNACCEPTED: Mapping[str, Any] = {
    "late_chunking_params": {"size": 5},
    "mm_processor_kwargs": {"num_crops": 4},
    "media_io_kwargs": {"image": {}},
    "return_multivector": True,
    "stream": True,
    "late_chunking": True,
    "chunks": [[0, 5]],
    "labels": ["yes", "no"],
    "rank_fields": ["title", "text"],
    "max_chunks_per_doc": 10,
    "examples": [{"text": "a", "label": "b"}],
    "preset": "mine",
    "data": {"any": "thing"},
    "normalize": True,
    "dimensions": 3,
    "function_to_apply": "sigmoid",
}
"""Values that fields are refused with."""

"""The tiny models that vLLM and this server are compared on, and the arguments that each is started with.

vLLM's attention on CPU computes heads of at least 32 dimensions, so the models are wider than those of other tests.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file

from tests.kept_folders import built_once, each_built_once
from tests.model_folders import write_json
from tests.models.classifier_families import LONG, padded_qwen3_tokenizer, reranker_tokenizer
from tests.models.model_families import (
    IDENTITY,
    MAX_LENGTH,
    NEW_NORMALIZE,
    NORMALIZE,
    Module,
    bert_tokenizer,
    dense,
    edit_json,
    legacy_pooling,
    modernbert_tokenizer,
    pooling,
    write_model,
    write_modules,
)
from tests.models.retrieval_families import bert_with_unused
from tests.rendering.chat.chat_folders import CHATML

HIDDEN = 64
ENCODER: Mapping[str, Any] = {
    "hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": MAX_LENGTH,
}  # fmt: skip
DECODER: Mapping[str, Any] = {**ENCODER, "head_dim": 32, "num_key_value_heads": 1}
CHAT: Mapping[str, Any] = {**DECODER, "max_position_embeddings": LONG}
"""As many positions as the tokenizer has for its limit: vLLM goes by the positions alone."""

LABELS = {0: "calm", 1: "glad", 2: "cross"}

TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>tools\\n' -}}{%- for tool in tools -%}{{- tool.function.name + '\\n' -}}{%- endfor -%}
{%- endif -%}
"""
"""Put in front of a chat template, it names the tools."""

OTHER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""For ``--chat-template``."""

JUDGE = (
    "{% set asked = instruction | default('judge') %}<|im_start|>{{ asked }}: "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} / "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>so yes or no:"
)
"""A generative reranker's template."""


@frozen(kw_only=True)
class ModelKind:
    """A folder, and the arguments with which each server, or both, serve it."""

    write: Callable[[Path], Path]
    both: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()


def of_class(name: str, tokenizer: Callable[[], Any] = bert_tokenizer, **config: Any) -> Callable[[Path], Path]:
    """Return what writes a model of a class of transformers: without modules.json."""
    return lambda folder: write_model(folder, name, tokenizer(), **{**ENCODER, **config})


BARE = each_built_once(
    bert=of_class("BertModel"),
    modernbert=of_class("ModernBertModel", modernbert_tokenizer),
    qwen3=of_class("Qwen3Model", padded_qwen3_tokenizer, **DECODER),
    cross_encoder=of_class("BertForSequenceClassification", num_labels=1),
    classifier=of_class("BertForSequenceClassification", id2label=LABELS),
    token_classifier=of_class("BertForTokenClassification", id2label=LABELS),
    # Its head has weights of its own: vLLM does not find shared ones.
    sparse=of_class("BertForMaskedLM", tie_word_embeddings=False),
    generative_reranker=of_class("Qwen3ForCausalLM", lambda: reranker_tokenizer(JUDGE), **CHAT),
)


@built_once
def embedding(folder: Path) -> Path:
    """Mean and normalised."""
    BARE["bert"](folder)
    write_modules(folder, (legacy_pooling("mean_tokens"), Module(type=NORMALIZE)))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 48})
    return folder


@built_once
def matryoshka(folder: Path) -> Path:
    """As ``embedding``, for vectors of 16, 32 and 64 dimensions."""
    embedding(folder)
    edit_json(folder / "config.json", lambda config: config.update(matryoshka_dimensions=[16, 32, 64]))
    return folder


@built_once
def prompted(folder: Path) -> Path:
    """As ``embedding``, with a prompt for queries."""
    embedding(folder)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    return folder


@built_once
def chat(folder: Path) -> Path:
    """A decoder whose input may be a conversation."""
    tokenizer = reranker_tokenizer(TOOLS + CHATML)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    write_model(folder, "Qwen3Model", tokenizer, **CHAT)
    write_modules(folder, (pooling("lasttoken", embedding_dimension=HIDDEN), Module(type=NORMALIZE)))
    return folder


@built_once
def decoder_classifier(folder: Path) -> Path:
    tokenizer = padded_qwen3_tokenizer()
    settings = {**DECODER, "pad_token_id": tokenizer.pad_token_id}
    return write_model(folder, "Qwen3ForSequenceClassification", tokenizer, id2label=LABELS, **settings)


@built_once
def late_interaction(folder: Path) -> Path:
    """A model without markers and expansion of queries, of which vLLM would know nothing."""
    BARE["bert"](folder)
    narrower = dense(HIDDEN, 32, bias=False, activation=IDENTITY)
    mask = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
    modules = (
        evolve(narrower, config={**narrower.config, "module_input_name": "token_embeddings"}),
        Module(type=mask),
        Module(type=NEW_NORMALIZE, config={"module_input_name": "token_embeddings"}),
    )
    write_modules(folder, modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"})
    return folder


@built_once
def colbert(folder: Path) -> Path:
    """The original ColBERT's form."""
    write_model(folder, "BertModel", bert_with_unused(), **ENCODER)
    edit_json(folder / "config.json", lambda config: config.update(architectures=["HF_ColBERT"]))
    encoder = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": weight for name, weight in encoder.items() if "pooler" not in name}
    weights["linear.weight"] = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(3))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


RERANKER_OVERRIDES = (
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}'
)

SPARSE_OVERRIDES = '{"architectures": ["BertSpladeSparseEmbeddingModel"]}'
CHUNKED = ("--pooler-config", '{"enable_chunked_processing": true, "max_embed_len": 1000}')
CLS = ("--pooling", "cls", "--normalize")
"""What vLLM assumes of encoders that say nothing."""
TOKENS = ("--pooler-config", '{"task": "token_classify"}')
TOKEN_VECTORS = ("--pooler-config", '{"task": "token_embed"}')
MEAN = ("--pooler-config", '{"pooling_type": "MEAN", "use_activation": false}')

KINDS: Mapping[str, ModelKind] = {
    "embedding": ModelKind(write=embedding),
    "embedding with prompts": ModelKind(write=prompted),
    "matryoshka": ModelKind(write=matryoshka),
    "bare BERT": ModelKind(write=BARE["bert"], ours=CLS),
    "bare BERT without flags": ModelKind(write=BARE["bert"]),
    "bare BERT with mean": ModelKind(write=BARE["bert"], both=MEAN),
    "bare ModernBERT": ModelKind(write=BARE["modernbert"], ours=CLS),
    "bare decoder": ModelKind(write=BARE["qwen3"], ours=("--pooling", "last", "--normalize")),
    "chat": ModelKind(write=chat, vllm=("--enable-tokenizer-info-endpoint",)),
    "chat with another template": ModelKind(write=chat, both=("--chat-template", OTHER_TEMPLATE)),
    "cross-encoder": ModelKind(write=BARE["cross_encoder"]),
    "classifier": ModelKind(write=BARE["classifier"]),
    "decoder classifier": ModelKind(write=decoder_classifier),
    "token classifier": ModelKind(write=BARE["token_classifier"]),
    "classifier of tokens": ModelKind(write=BARE["classifier"], both=TOKENS),
    "decoder classifier of tokens": ModelKind(write=decoder_classifier, both=TOKENS),
    "token embeddings": ModelKind(write=embedding, both=TOKEN_VECTORS),
    "late interaction": ModelKind(write=late_interaction, vllm=TOKEN_VECTORS),
    "ColBERT": ModelKind(write=colbert),
    "generative reranker": ModelKind(
        write=BARE["generative_reranker"], vllm=("--hf-overrides", RERANKER_OVERRIDES, "--chat-template", JUDGE)
    ),
    "sparse": ModelKind(write=BARE["sparse"], vllm=("--hf-overrides", SPARSE_OVERRIDES)),
    "embedding in chunks": ModelKind(write=embedding, both=CHUNKED),
    "embedding with a key": ModelKind(write=embedding, both=("--api-key", "sesame"), ours=("--api-key-scope", "vllm")),
}

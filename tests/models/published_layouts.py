"""Folders with the published text of docs/published-models.toml, and models of its classes that are tiny and random."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen
from safetensors.torch import save_file

from tests.model_folders import write_json
from tests.models import retrieval_families, static_families
from tests.models.classifier_families import (
    GELU,
    cross_encoder,
    paired_modernbert_tokenizer,
    reranker_tokenizer,
    scores,
)
from tests.models.model_families import (
    FAMILIES,
    HIDDEN,
    JINA_V5_TASKS,
    NORMALIZE,
    Module,
    bert_tokenizer,
    dense,
    edit_json,
    gemma_tokenizer,
    layer_norm,
    legacy_pooling,
    modernbert_tokenizer,
    mpnet_tokenizer,
    plain_dense,
    pooling,
    qwen3_tokenizer,
    write_family,
    write_jina_v5,
    write_model,
    write_modules,
    xlm_roberta_tokenizer,
)
from tests.server.server_process import ROOT
from trio_pool_serve.models.loading.tokenizer_loading import native_options
from trio_pool_serve.models.model_kind import ModelFolder

TABLE: Sequence[Mapping[str, Any]] = tomllib.loads((ROOT / "docs" / "published-models.toml").read_text())["models"]


@frozen
class Layout:
    """What a folder has besides the files that the table quotes."""

    tokenizer: Callable[[], Any] = bert_tokenizer
    modules: tuple[Module, ...] = ()
    """Behind the transformer."""
    write: Callable[[Path], object] | None = None
    """Writes a tiny model in the layout, in place of one of the quoted class."""
    oracle: Callable[[Path], Path] | None = None
    """Writes the same weights as the oracle needs them, if it cannot load the published folder."""
    is_read_alone: bool = True
    """Whether the small files suffice to recognise the model."""


UNIT_LENGTH = Module(type=NORMALIZE)
MEAN = legacy_pooling("mean_tokens")
CLS = legacy_pooling("cls_token")
BY_MEAN = Layout(modules=(MEAN, UNIT_LENGTH))
BY_CLS = Layout(modules=(CLS, UNIT_LENGTH))


def of_xlm_roberta(*modules: Module) -> Layout:
    return Layout(xlm_roberta_tokenizer, modules)


def of_paraphrases() -> Any:
    """BERT's layers over XLM-RoBERTa's pieces."""
    tokenizer = xlm_roberta_tokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **special_tokens(tokenizer)
    )


def special_tokens(tokenizer: Any) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}


def of_family(name: str, tokenizer: Callable[[], Any] = bert_tokenizer) -> Layout:
    """A family that transformers has under other names than the published ones."""
    published, native = (partial(write_family, name=name, as_published=own) for own in (True, False))
    return Layout(tokenizer, FAMILIES[name].modules, published, native)


def of_jina_v5(family: str) -> Layout:
    """The adapters have no weights: ``tests/serving/test_task_adapters.py`` computes with some."""

    def published(folder: Path) -> None:
        write_jina_v5(folder, family)
        for task in JINA_V5_TASKS:
            write_json(folder / "adapters" / task / "adapter_config.json", {})

    return Layout(
        FAMILIES[family].tokenizer, write=published, oracle=partial(write_jina_v5, family=family, as_published=False)
    )


LOGIT_SCORE = Module(
    type="sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    config={"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"},
)


def generative_reranker(folder: Path) -> Path:
    """As sentence-transformers saves Qwen3-Reranker; the tiny vocabulary has the two words elsewhere."""
    write_model(folder, "Qwen3ForCausalLM", reranker_tokenizer())
    cross_encoder(folder).save_pretrained(str(folder))
    return folder


def encoder_decoder(folder: Path) -> None:
    size = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, **size
    )
    transformers.BartForSequenceClassification(config).save_pretrained(folder)


SCORED = (pooling("cls"), dense(bias=False, activation=GELU), layer_norm(), scores())
GEMMA_MODULES = (pooling("mean"), plain_dense(HIDDEN, 4 * HIDDEN), plain_dense(4 * HIDDEN, HIDDEN), UNIT_LENGTH)

LAYOUTS: Mapping[str, Layout] = {
    "sentence-transformers/all-mpnet-base-v2": Layout(mpnet_tokenizer, (MEAN, UNIT_LENGTH)),
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": Layout(of_paraphrases, (MEAN,)),
    "sentence-transformers/multi-qa-MiniLM-L6-cos-v1": BY_MEAN,
    "BAAI/bge-small-en-v1.5": BY_CLS,
    "BAAI/bge-m3": Layout(xlm_roberta_tokenizer, (CLS, UNIT_LENGTH), retrieval_families.write_bge_m3),
    "intfloat/e5-small-v2": BY_MEAN,
    "intfloat/multilingual-e5-base": of_xlm_roberta(MEAN, UNIT_LENGTH),
    "intfloat/multilingual-e5-large-instruct": of_xlm_roberta(MEAN, UNIT_LENGTH),
    "thenlper/gte-small": BY_MEAN,
    "Qwen/Qwen3-Embedding-0.6B": Layout(qwen3_tokenizer, (legacy_pooling("lasttoken"), UNIT_LENGTH)),
    "google/embeddinggemma-300m": Layout(gemma_tokenizer, GEMMA_MODULES),
    "ibm-granite/granite-embedding-small-english-r2": Layout(modernbert_tokenizer, (CLS, UNIT_LENGTH)),
    "nomic-ai/nomic-embed-text-v1.5": of_family("nomic"),
    "nomic-ai/nomic-embed-text-v2-moe": of_xlm_roberta(MEAN, UNIT_LENGTH),
    "Alibaba-NLP/gte-large-en-v1.5": of_family("gte_without_scaling"),
    "Alibaba-NLP/gte-multilingual-base": of_family("gte", xlm_roberta_tokenizer),
    "nvidia/llama-nemotron-embed-1b-v2": of_family("llama-nemotron"),
    "jinaai/jina-embeddings-v5-text-small": of_jina_v5("qwen3"),
    "jinaai/jina-embeddings-v5-text-nano": of_jina_v5("eurobert"),
    "jinaai/jina-embeddings-v2-base-en": Layout(modules=(MEAN,)),
    "BAAI/bge-reranker-base": of_xlm_roberta(),
    "BAAI/bge-reranker-v2-m3": of_xlm_roberta(),
    "jinaai/jina-reranker-v2-base-multilingual": of_xlm_roberta(),
    "BAAI/bge-reranker-v2-gemma": Layout(gemma_tokenizer),
    "Qwen/Qwen3-Reranker-0.6B": Layout(reranker_tokenizer, (LOGIT_SCORE,), generative_reranker),
    "cross-encoder/ettin-reranker-17m-v1": Layout(paired_modernbert_tokenizer, SCORED),
    "cross-encoder/ms-marco-MiniLM-L6-v2": Layout(),
    "colbert-ir/colbertv2.0": Layout(write=retrieval_families.colbert_v2),
    "lightonai/GTE-ModernColBERT-v1": Layout(write=retrieval_families.pylate_modernbert),
    "minishlab/potion-base-8M": Layout(write=static_families.potion, is_read_alone=False),
    "sentence-transformers/static-retrieval-mrl-en-v1": Layout(
        write=partial(static_families.write_static, path="0_StaticEmbedding", dotted=static_families.OLD_STATIC)
    ),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": Layout(),
    "dslim/bert-base-NER": Layout(),
    "facebook/bart-large-mnli": Layout(write=encoder_decoder),
    "naver/splade-v3": Layout(write=retrieval_families.early_splade),
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": Layout(write=retrieval_families.opensearch),
}
"""By the first id of a row."""


def quoted(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files that a row quotes, parsed."""
    return {name: json.loads(text) for name, text in row.get("files", {}).items()}


def write_published(folder: Path, row: Mapping[str, Any]) -> Path:
    """Write the small files of a row as published, without weights and tokenizer."""
    layout = LAYOUTS.get(row["ids"][0], Layout())
    for name, document in quoted(row).items():
        write_json(folder / name, document)
    for name in row.get("others", ()):
        (folder / name).touch()
    if layout.modules:
        write_modules(folder, layout.modules)
    return folder


AUTO_CLASSES = {
    "cross_encoder": "AutoModelForSequenceClassification",
    "sequence_classifier": "AutoModelForSequenceClassification",
    "token_classifier": "AutoModelForTokenClassification",
}
"""By the kind of a row; others are those of ``AutoModel``."""


def parameters_of(folder: ModelFolder[Any], kind: str) -> int:
    """Return the number of parameters of the transformer that a folder describes, in its full size."""
    config = native_options(folder).get("config") or transformers.AutoConfig.from_pretrained(folder.path)
    with torch.device("meta"):
        model = getattr(transformers, AUTO_CLASSES.get(kind, "AutoModel")).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def write_tiny(folder: Path, row: Mapping[str, Any]) -> Path:
    """Write the same with a tokenizer and a tiny model with random weights."""
    layout, files = LAYOUTS.get(row["ids"][0], Layout()), quoted(row)
    if layout.write is not None:
        layout.write(folder)
        for name in files.keys() - {
            "config.json",
            "modules.json",
            "sentence_bert_config.json",
            "tokenizer_config.json",
            *(name for name in files if name.startswith("adapters/")),
        }:
            kept = {key: value for key, value in files[name].items() if key not in ("dim", "doc_maxlen")}
            edit_json(folder / name, lambda own, kept=kept: own.update(kept))
        return folder
    tokenizer = layout.tokenizer()
    tokenizer.save_pretrained(folder)
    config = files.pop("config.json", {})
    config |= tiny_sizes(config, tokenizer) if {"hidden_size", "n_embd", "dim"} & config.keys() else {}
    write_random_weights(folder, config)
    write_published(folder, row | {"files": {name: json.dumps(document) for name, document in files.items()}})
    if "tokenizer_config.json" in files:  # the tiny tokenizer's own, with the published length
        tokenizer.model_max_length = files["tokenizer_config.json"]["model_max_length"]
        tokenizer.save_pretrained(folder)
    if config:
        write_json(folder / "config.json", config)
    return folder


def tiny_sizes(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the keys of a published config.json that a tiny model has other values of."""
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "initializer_range": 0.3,
    }  # fmt: skip
    if config.get("model_type") == "distilbert":
        sizes |= {"dim": HIDDEN, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    others = {
        "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "max_window_layers": 2,
        "local_attention": 8, "global_attn_every_n_layers": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")}
    return sizes | {name: value for name, value in (others | ids).items() if config.get(name) is not None}


def write_random_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Write weights of the class in a config that transformers has, else a tensor that no class of it has."""
    name = next(iter(config.get("architectures", ())), "")
    if not hasattr(transformers, name) or "auto_map" in config:
        save_file({"of.other.code": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    left_out = ("architectures", "auto_map", "dtype", "torch_dtype", "model_type")
    own = kind.config_class(**{key: value for key, value in config.items() if key not in left_out})
    model = kind(own).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms start as zeros and ones, which hide faults
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)

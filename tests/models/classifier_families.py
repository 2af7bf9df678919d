"""Tiny classifiers and rerankers of real families, as transformers and sentence-transformers save them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import evolve
from tokenizers import processors

from tests.kept_folders import built_once
from tests.model_folders import write_json
from tests.models.model_families import (
    HIDDEN,
    IDENTITY,
    MAX_LENGTH,
    TEXTS,
    Family,
    Module,
    bert_tokenizer,
    byte_pairs,
    deberta_tokenizer,
    dense,
    distilbert_tokenizer,
    layer_norm,
    modernbert_tokenizer,
    pooling,
    qwen3_tokenizer,
    roberta_tokenizer,
    vocab_and_merges,
    write_model,
    write_modules,
    xlm_roberta_tokenizer,
)
from trio_pool_serve.prompts import PairPrompt

PAIRS = [
    *zip(TEXTS, TEXTS[::-1], strict=True),
    (TEXTS[3], TEXTS[3] + " And more of it."),
    ("who owns tasks", TEXTS[3]),
    (TEXTS[3], "a nursery"),
    ("", "Yes"),
]
PROMPTS = [PairPrompt(first, second) for first, second in PAIRS]


def paired_modernbert_tokenizer() -> Any:
    """Has a template for pairs too, as ModernBERT's own has."""
    tokenizer = modernbert_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def padded_qwen3_tokenizer() -> Any:
    """Pads with a token that no text ends with, so that transformers finds a text's last token."""
    tokenizer = qwen3_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    return tokenizer


def reranker_tokenizer(chat_template: str | None = None) -> Any:
    """Qwen3's, with the two words whole."""
    pairs = byte_pairs("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = transformers.Qwen2Tokenizer(
        **vocab_and_merges(pairs), padding_side="left", model_max_length=LONG, pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["yes", "no", "<extra_0>"])
    tokenizer.chat_template = chat_template
    return tokenizer


LONG = 400
"""The judge's frame alone has some 200 of these small tokens."""


ENCODERS: Mapping[str, Family] = {
    "bert": Family("Bert", bert_tokenizer),
    "roberta": Family("Roberta", roberta_tokenizer),
    "xlm-roberta": Family("XLMRoberta", xlm_roberta_tokenizer),
    "distilbert": Family("DistilBert", distilbert_tokenizer),
    "modernbert": Family("ModernBert", paired_modernbert_tokenizer),
    "deberta-v2": Family("DebertaV2", deberta_tokenizer),
}

DECODERS: Mapping[str, Family] = {
    name: Family(kind, padded_qwen3_tokenizer)
    for name, kind in {
        "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral", "gemma2": "Gemma2",
    }.items()
}  # fmt: skip

FAMILIES = {**ENCODERS, **DECODERS}


@built_once
def write_classifier(folder: Path, name: str, head: str = "SequenceClassification", **config: Any) -> Path:
    """Write a family's classifier."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    if name in DECODERS:
        config = {"pad_token_id": tokenizer.pad_token_id, **config}
    return write_model(folder, f"{family.model}For{head}", tokenizer, **config)


def scores(labels: int = 1, **more: Any) -> Module:
    """The last module of a cross-encoder."""
    module = dense(HIDDEN, labels, activation=IDENTITY)
    return evolve(module, config={**module.config, "module_output_name": "scores", **more})


@built_once
def write_pooled(folder: Path, name: str, modules: Sequence[Module], **settings: object) -> Path:
    """Write a cross-encoder with ``modules`` after a family's transformer; ``settings`` are the whole model's."""
    family = FAMILIES[name]
    write_model(folder, f"{family.model}Model", family.tokenizer())
    own = {"max_seq_length": MAX_LENGTH, "transformer_task": "feature-extraction"}
    write_json(folder / "sentence_bert_config.json", own)
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **settings})
    write_modules(folder, modules)
    return folder


GELU = "torch.nn.modules.activation.GELU"

POOLED: Mapping[str, Callable[[Path], Path]] = {
    # As the Ettin rerankers are published.
    "modernbert_with_pooled_scores": partial(
        write_pooled,
        name="modernbert",
        modules=(pooling("cls"), dense(bias=False, activation=GELU), layer_norm(), scores()),
        activation_fn=IDENTITY,
    ),
    "qwen3_with_pooled_scores": partial(write_pooled, name="qwen3", modules=(pooling("lasttoken"), scores())),
    "bert_with_pooled_labels": partial(write_pooled, name="bert", modules=(pooling("mean"), scores(3))),
}
"""Cross-encoders whose scores modules compute."""


def write_reranker(folder: Path, tokenizer_folder: Path) -> Path:
    """Write a small random cross-encoder, for pages that name one of the hub's; it takes texts as long as theirs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.model_max_length = 512
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=1, **size)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cross_encoder(path: Path, **options: Any) -> Any:
    """The oracle: sentence-transformers' cross-encoder on the same folder."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(path), device="cpu", local_files_only=True, **options)

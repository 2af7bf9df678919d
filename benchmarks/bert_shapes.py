"""BERT with random weights and a real tokenizer: computes as long as a trained one of its size does."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.model import MODEL_PATH

Shape: TypeAlias = Literal["base", "tiny", "narrow"]
"""base: that of BERT-base, bge-base-en and arctic-embed-m. tiny: to see whether a script works. narrow: the layers of
base, which compute next to nothing."""

SIZES: dict[Shape, dict[str, int]] = {
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "narrow": {"hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 32},
}

VOCABULARY = 30522

MAX_TOKENS = 512

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def write_bert(folder: Path, shape: Shape) -> Path:
    """Write the model as sentence-transformers would: BERT, the first token's state, length 1."""
    from transformers import BertModel

    _write_transformer(folder, shape, BertModel)
    models = "sentence_transformers.models"
    _write_modules(
        folder, {"": f"{models}.Transformer", "1_Pooling": f"{models}.Pooling", "2_Normalize": f"{models}.Normalize"}
    )
    _write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": SIZES[shape]["hidden_size"], "pooling_mode_cls_token": True},
    )
    return folder


def write_splade(folder: Path, shape: Shape) -> Path:
    """Write a model whose outputs are weights of the vocabulary's tokens, as SPLADE's are."""
    from transformers import BertForMaskedLM

    _write_transformer(folder, shape, BertForMaskedLM)
    models = "sentence_transformers.sparse_encoder.models"
    _write_modules(folder, {"": f"{models}.MLMTransformer", "1_SpladePooling": f"{models}.SpladePooling"})
    _write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})
    _write(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    return folder


def _write_transformer(folder: Path, shape: Shape, architecture: Any) -> None:
    import torch
    from transformers import BertConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    # Wider than the usual initialisation, so that attention matters and texts have different vectors.
    architecture(BertConfig(vocab_size=VOCABULARY, initializer_range=0.05, **SIZES[shape])).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(Path(MODEL_PATH) / name, folder / name)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _write_modules(folder: Path, types: dict[str, str]) -> None:
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": name}
        for index, (path, name) in enumerate(types.items())
    ]
    _write(folder / "modules.json", entries)


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))

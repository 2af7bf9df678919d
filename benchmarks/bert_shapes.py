"""BERT with random weights and a real tokenizer: computes as long as a trained one of its size does."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.model import MODEL_PATH

Shape: TypeAlias = Literal["base", "tiny"]
"""base: that of BERT-base, bge-base-en and arctic-embed-m. tiny: to see whether a script works."""

SIZES: dict[Shape, dict[str, int]] = {
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def write_bert(folder: Path, shape: Shape) -> Path:
    """Write the model as sentence-transformers would: BERT, the first token's state, length 1."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    # Wider than the usual initialisation, so that attention matters and texts have different vectors.
    BertModel(BertConfig(vocab_size=30522, initializer_range=0.05, **SIZES[shape])).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(Path(MODEL_PATH) / name, folder / name)
    modules = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
        for index, (module, path) in enumerate(zip(modules, paths, strict=True))
    ]
    _write(folder / "modules.json", entries)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    _write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": SIZES[shape]["hidden_size"], "pooling_mode_cls_token": True},
    )
    return folder


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))

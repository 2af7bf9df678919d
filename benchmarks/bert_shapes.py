"""Models with random weights and a real tokenizer: they compute as long as trained ones of their size do."""

import json
import math
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
    _write_pooling(folder, SIZES[shape]["hidden_size"], "cls_token")
    return folder


LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "bge-m3": (
        "XLMRobertaModel",
        {
            "vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096, "max_position_embeddings": 8194, "type_vocab_size": 1,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Model",
        {
            "vocab_size": 151_669, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32_768,
        },
    ),
}  # fmt: skip
"""Architectures and sizes of models from 0.5 billion parameters on, by the models that have them."""


def write_larger(folder: Path, name: str, shape: Shape) -> Path:
    """Write a model of ``LARGER`` in bfloat16, or one of its kind with the sizes of another shape than base.

    Its vectors are the means of the tokens' states: the first token of a decoder has seen no other.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    architecture, sizes = LARGER[name]
    if shape != "base":
        sizes = {**sizes, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 32, **SIZES[shape]}
    model = getattr(transformers, architecture)
    config = model.config_class(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    config.architectures, config.dtype = [architecture], "bfloat16"
    with torch.device("meta"):
        states = model(config).state_dict()
    torch.manual_seed(0)
    config.save_pretrained(folder)
    weights = {name: _random(name, state.shape) for name, state in states.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _copy_tokenizer(folder, model_input_names=["input_ids", "attention_mask"])
    _write_pooling(folder, config.hidden_size, "mean_tokens")
    return folder


def _random(name: str, size: Any) -> Any:
    import torch

    if name.endswith("bias"):
        return torch.zeros(size, dtype=torch.bfloat16)
    if "norm" in name.lower():
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02)


def parameters_of(folder: Path) -> int:
    """Return the number of parameters of a model that was written, without tables of embeddings."""
    from safetensors import safe_open

    tables = ("embeddings.weight", "embed_tokens.weight")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = [name for name in weights.keys() if not name.endswith(tables)]  # noqa: SIM118
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in names)


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
    _copy_tokenizer(folder)


def _copy_tokenizer(folder: Path, **settings: Any) -> None:
    for name in TOKENIZER_FILES:
        shutil.copyfile(Path(MODEL_PATH) / name, folder / name)
    config = folder / "tokenizer_config.json"
    _write(config, json.loads(config.read_text()) | settings)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})


def _write_pooling(folder: Path, width: int, mode: str) -> None:
    models = "sentence_transformers.models"
    _write_modules(
        folder, {"": f"{models}.Transformer", "1_Pooling": f"{models}.Pooling", "2_Normalize": f"{models}.Normalize"}
    )
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, f"pooling_mode_{mode}": True})


def _write_modules(folder: Path, types: dict[str, str]) -> None:
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": name}
        for index, (path, name) in enumerate(types.items())
    ]
    _write(folder / "modules.json", entries)


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))

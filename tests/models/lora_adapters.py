"""LoRA adapters with random weights, written by PEFT, and what PEFT computes with them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

from tests.models.model_families import reference, write_family
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.types import Adapter, Vectors

LORA: dict[str, dict[str, Any]] = {
    "bert": {"target_modules": ["query", "dense", "word_embeddings"], "use_rslora": True},
    "roberta": {"rank_pattern": {"query": 2}, "alpha_pattern": {"dense": 16}},
    "distilbert": {"target_modules": ["q_lin", "lin2"]},
    "mpnet": {"target_modules": r".*\.(q|k|v)"},
    "modernbert": {"target_modules": ["Wqkv", "Wo"]},
    "xlm-roberta": {},
    "qwen3": {"target_modules": ["q_proj", "up_proj", "embed_tokens"]},
    "gemma3": {"target_modules": ["v_proj", "embed_tokens"]},
    "t5": {"target_modules": ["q", "wo"], "auto_class": "T5EncoderModel"},
}
"""Adapters of families: embeddings (gemma3 scales them), patterns, expressions, and all linear layers."""


def write_lora(
    folder: Path, base: Path, seed: int = 0, *, auto_class: str = "AutoModel", r: int = 4, **config: Any
) -> Adapter:
    """Write an adapter of all linear layers, or as ``config`` says, to a folder; return it as it is registered."""
    model = getattr(transformers, auto_class).from_pretrained(base)
    torch.manual_seed(seed)
    lora = LoraConfig(r=r, lora_alpha=8, **{"target_modules": "all-linear", "init_lora_weights": False} | config)
    with warnings.catch_warnings(action="ignore", category=Warning):
        adapted: Any = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    with warnings.catch_warnings(action="ignore", category=Warning):
        adapted.save_pretrained(folder)
    return registered(folder)


def of_the_first_layer(folder: Path, base: Path) -> Adapter:
    """Write an adapter whose config names modules of all layers, with tensors of the first one alone."""
    write_lora(folder, base, target_modules=["query"])
    tensors = load_file(folder / "adapter_model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if ".layer.0." in name}
    assert len(first) == len(tensors) // 2
    save_file(first, folder / "adapter_model.safetensors")
    return registered(folder)


def of_a_wider_model(folder: Path, base: Path) -> Adapter:
    write_lora(folder, base, target_modules=["query"])
    tensors = load_file(folder / "adapter_model.safetensors")
    wider = {name: np.pad(tensor, [(0, 0), (0, 8)]) if "lora_A" in name else tensor for name, tensor in tensors.items()}
    save_file(wider, folder / "adapter_model.safetensors")
    return registered(folder)


def of_another_family(folder: Path, base: Path) -> Adapter:
    del base
    return write_lora(folder, write_family(folder.with_name("modernbert"), "modernbert"), target_modules=["Wqkv"])


def of_a_norm(folder: Path, base: Path) -> Adapter:
    return write_lora(folder, base, target_modules=["query"], modules_to_save=["embeddings.LayerNorm"])


def registered(folder: Path) -> Adapter:
    return Adapter(str(folder), read_adapter(folder).digest)


def vectors_by_peft(
    base: Path,
    adapter: Adapter | Path | None,
    texts: Sequence[str],
    dtype: torch.dtype = torch.float64,  # in float32 the rounding of both would be compared
    **options: Any,
) -> list[Vectors]:
    """Return what sentence-transformers computes with the adapter or its folder, or without one."""
    theirs = reference(base)
    if adapter is not None:
        folder = adapter if isinstance(adapter, Path) else adapter.folder
        with warnings.catch_warnings(action="ignore", category=Warning):
            theirs[0].auto_model = PeftModel.from_pretrained(theirs[0].auto_model, folder)
    theirs.to(dtype)
    return [np.asarray(vector, np.float32) for vector in theirs.encode(list(texts), **options)]

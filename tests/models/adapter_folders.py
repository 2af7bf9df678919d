"""LoRA adapters that tests write by PEFT, and their files written by hand."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, frozen
from safetensors.numpy import save_file

from tests.model_folders import write_json

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}


def factors(
    module: str = "encoder.query", r: int = 2, size: int = 3, kind: str = "lora_{}.weight", out: int | None = None
) -> dict[str, Any]:
    """A module's two tensors, as PEFT names them."""
    random = np.random.default_rng(r)
    name = f"base_model.model.{module}.{kind}"
    return {
        name.format("A"): random.normal(size=(r, size)).astype(np.float32),
        name.format("B"): random.normal(size=(out or size + 1, r)).astype(np.float32),
    }


def write_adapter(folder: Path, tensors: Mapping[str, Any] | None = None, **config: object) -> Path:
    """Write an adapter's two files; ``config`` adds to, or changes, a plain LoRA's."""
    write_json(folder / "adapter_config.json", LORA | config)
    save_file(dict(factors() if tensors is None else tensors), folder / "adapter_model.safetensors")
    return folder


@frozen
class Adapted:
    """A model's task, its folder, the class by which sentence-transformers loads it, and its adapter's config."""

    task: str
    write: Callable[[Path], Path]
    target_modules: list[str] | str
    config: Mapping[str, Any] = Factory(dict)


def _adapters() -> dict[str, Adapted]:
    from tests.models.classifier_families import write_classifier
    from tests.models.model_families import write_family
    from tests.models.retrieval_families import LATE_INTERACTION, SPARSE

    def family(name: str) -> Callable[[Path], Path]:
        return partial(write_family, name=name)

    def judge(name: str) -> Callable[[Path], Path]:
        return partial(write_classifier, name=name, num_labels=1)

    head = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    patterns = {"rank_pattern": {"Wo": 2}, "alpha_pattern": {r"layers\.1\.attn\.Wqkv": 5}}
    return {
        "bert": Adapted("embed", family("bert"), ["query", "dense", "word_embeddings"]),
        "xlm-roberta": Adapted("embed", family("xlm-roberta"), ["query", "key"], {"use_rslora": True}),
        "modernbert": Adapted("embed", family("modernbert"), ["Wqkv", "Wo"], patterns),
        "qwen3": Adapted("embed", family("qwen3"), "all-linear", {"init_lora_weights": "gaussian"}),
        "bert cross-encoder": Adapted("score", judge("bert"), ["query"], head),
        "qwen3 cross-encoder": Adapted("score", judge("qwen3"), ["q_proj", "embed_tokens"], head),
        "pylate_modernbert": Adapted("token_embed", LATE_INTERACTION["pylate_modernbert"], ["Wqkv"]),
        "splade_max": Adapted("sparse_embed", SPARSE["splade_max"], ["value", "word_embeddings"]),
    }


ADAPTERS = _adapters()
"""By the base. The embeddings of the last are tied to its decoder, which the adapter does not update."""


def randomise(model: Any) -> None:
    """Give an adapter's tensors values that show."""
    import torch

    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))


def write_adapted(folder: Path, name: str) -> Path:
    """Write a base and, beside it, an adapter as sentence-transformers saves it; return the adapter's folder."""
    import sentence_transformers
    import transformers.integrations.peft
    from peft import LoraConfig

    # 5.24 refuses peft before 0.22, which is not to be had yet; otherwise its integration of peft is that of 5.23.
    transformers.integrations.peft.MIN_PEFT_VERSION = "0.21"
    adapted = ADAPTERS[name]
    of_task = {"score": "CrossEncoder", "token_embed": "MultiVectorEncoder", "sparse_embed": "SparseEncoder"}
    encoder = getattr(sentence_transformers, of_task.get(adapted.task, "SentenceTransformer"))
    model = encoder(str(adapted.write(folder / "base")), device="cpu", local_files_only=True)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=adapted.target_modules, **adapted.config))
    randomise(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)
        model.save(str(folder / "adapter"))
    return folder / "adapter"

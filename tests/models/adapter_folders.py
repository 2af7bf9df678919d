"""LoRA adapters that tests write by PEFT, and their files written by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.model_folders import write_json

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}


def factors(module: str = "encoder.query", r: int = 2, size: int = 3, kind: str = "lora_{}.weight") -> dict[str, Any]:
    """A module's two tensors, as PEFT names them."""
    random = np.random.default_rng(r)
    name = f"base_model.model.{module}.{kind}"
    return {
        name.format("A"): random.normal(size=(r, size)).astype(np.float32),
        name.format("B"): random.normal(size=(size + 1, r)).astype(np.float32),
    }


def write_adapter(folder: Path, tensors: Mapping[str, Any] | None = None, **config: object) -> Path:
    """Write an adapter's two files; ``config`` adds to, or changes, a plain LoRA's."""
    write_json(folder / "adapter_config.json", LORA | config)
    save_file(dict(factors() if tensors is None else tensors), folder / "adapter_model.safetensors")
    return folder

"""Some of a checkpoint's weights, selected by name."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import read_json


def read_weights(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights whose names begin with ``prefix``, without it. Raises ``ModelLoadError``."""
    files = _files(folder, prefix)
    weights: dict[str, Tensor] = {}
    try:
        for path in files:
            weights |= _read_safe(path, prefix) if path.suffix == ".safetensors" else _read_pickled(path, prefix)
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    require_finite(weights.items(), folder)
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def require_finite(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Raise ``ModelLoadError`` with the name of the first tensor that has infinities or NaN; FP8 is not looked at."""
    for name, tensor in tensors:
        is_float = tensor.is_floating_point() and tensor.itemsize > 1
        if is_float and tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise ModelLoadError(f"{name} in {folder} has numbers that are not finite ({tensor.dtype}).")


def _files(folder: Path, prefix: str) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        shards: Mapping[str, str] = read_json(folder / f"{stem}.index.json").get("weight_map") or {}
        if shards:
            return sorted({folder / shard for name, shard in shards.items() if name.startswith(prefix)})
        if (folder / stem).is_file():
            return [folder / stem]
    raise ModelLoadError(f"{folder} holds no weights.")


def _read_safe(path: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys() if name.startswith(prefix)}  # noqa: SIM118


def _read_pickled(path: Path, prefix: str) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return {name: weight for name, weight in stored.items() if name.startswith(prefix)}

"""Loading static embeddings: the table, and the modules after it, into a runner that computes with NumPy."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.files.model_digest import fingerprint_of_loaded
from trio_pool_serve.models.files.tensors import FILE, read_tensors
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.static import Static
from trio_pool_serve.runner.openvino.heads import Floats
from trio_pool_serve.runner.runner_description import RunnerDescription
from trio_pool_serve.runner.static_runner import (
    ACTIVATIONS,
    Dense,
    LayerNorm,
    StaticRunner,
    TokenTable,
    VectorModule,
    normalized,
    truncated,
)
from trio_pool_serve.threads.offload import Offload

TANH = "torch.nn.modules.activation.Tanh"


def open_static(folder: ModelFolder[Static], config: ModelConfig, offload: Offload) -> StaticRunner:  # noqa: ARG001
    """Return the runner of a ``Static`` model. Blocks. Raises ``ModelLoadError``."""
    if config.backend in ("openvino", "compile"):
        raise ModelLoadError(f"--backend {config.backend}: NumPy computes static embeddings.")
    if config.dtype == "int8":
        raise ModelLoadError("--dtype int8: static embeddings are not quantised.")
    spec, table = folder.spec, read_table(folder.transformer_path)
    modules = spec.modules[: -1 if spec.normalizes else None]
    layers, width = load_layers(modules, table.width)
    parameters = table.parameters + sum(layer.parameters for layer in layers if isinstance(layer, Dense | LayerNorm))
    return StaticRunner(
        table,
        layers,
        normalizes=spec.normalizes,
        description=RunnerDescription(
            model_type=folder.model_type,
            parameters=parameters,
            weight_bytes=table.nbytes + 4 * (parameters - table.parameters),
            dtype="float32",
            requested_dtype="float32",
            device="cpu",
            heads="mean of the tokens' rows",
            dimensions=width,
            max_tokens=folder.max_model_len,
            backend="numpy",
            computation=("by NumPy",),
            fingerprint=fingerprint_of_loaded(folder.path, config, (), "float32"),
        ),
    )


def read_table(folder: Path) -> TokenTable:
    """Return the table of a folder whose shapes fit. Raises ``ModelLoadError``."""
    tensors = read_tensors(folder)
    is_plain = "embedding.weight" in tensors
    rows = tensors["embedding.weight" if is_plain else "embeddings"]
    mapping, weights = (None, None) if is_plain else (tensors.get("mapping"), tensors.get("weights"))
    if mapping is not None and not (mapping.dtype.kind == "i" and 0 <= mapping.min() <= mapping.max() < len(rows)):
        raise ModelLoadError(
            f"{folder / FILE}: mapping ({mapping.dtype}) has numbers from {mapping.min()} to {mapping.max()}; they "
            f"must be indices of the {len(rows)} rows."
        )
    rows = rows if rows.dtype == np.int8 else rows.astype(np.float32, copy=False)
    return TokenTable(rows, mapping, None if weights is None else weights.astype(np.float32))


def load_layers(modules: Sequence[ModuleFiles], width: int) -> tuple[list[VectorModule], int]:
    """Return the modules after a table, and the width of the vectors after them. Raises ``ModelLoadError``."""
    layers: list[VectorModule] = []
    for module in modules:
        if module.name == "Dense":
            layer = _dense(module, width)
            width = len(layer.weight)
            layers.append(layer)
        elif module.name == "Normalize":
            layers.append(normalized)
        elif module.name == "LayerNorm":
            tensors = _tensors(module, dict.fromkeys(("norm.weight", "norm.bias"), (width,)))
            layers.append(LayerNorm(tensors["norm.weight"], tensors["norm.bias"]))
        else:
            width = min(width, module.config["dimensions"])
            layers.append(partial(truncated, dimensions=width))
    return layers, width


def _dense(module: ModuleFiles, width: int) -> Dense:
    place, config = module.path / "config.json", module.config
    activation = config.get("activation_function", TANH)
    if activation not in ACTIVATIONS:
        raise ModelLoadError(f"{place}: activation_function is {activation!r}; {', '.join(ACTIVATIONS)} are supported.")
    out, adds_input = config.get("out_features"), bool(config.get("use_residual"))
    wanted: dict[str, tuple[Any, ...]] = {"linear.weight": (out, width)}
    wanted |= {"linear.bias": (out,)} if config.get("bias", True) else {}
    wanted |= {"residual.weight": (out, width)} if adds_input and out != width else {}
    tensors = _tensors(module, wanted)
    return Dense(
        tensors["linear.weight"],
        tensors.get("linear.bias"),
        ACTIVATIONS[activation],
        adds_input=adds_input,
        residual=tensors.get("residual.weight"),
    )


def _tensors(module: ModuleFiles, wanted: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Floats]:
    """Return the tensors of a module. Raises ``ModelLoadError`` for other shapes."""
    tensors = {name: tensor.astype(np.float32) for name, tensor in read_tensors(module.path).items()}
    if (shapes := {name: tensor.shape for name, tensor in tensors.items()}) != wanted:
        place = module.path / "config.json"
        raise ModelLoadError(f"{module.path / FILE} has the shapes {shapes}; {place} requires {wanted}.")
    return tensors

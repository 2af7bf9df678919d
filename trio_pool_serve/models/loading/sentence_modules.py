"""Loading the modules that ``modules.json`` lists after the transformer, as sentence-transformers defines them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.runner.heads.pooling import POOLING_TYPES, Normalize, Pooler

LEGACY_SWITCHES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pooling_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the pooling types a Pooling module's config asks for, in either of its two spellings."""
    asked = config.get("pooling_mode") or [name for name, switch in LEGACY_SWITCHES.items() if config.get(switch)]
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    unknown = [name for name in names if name not in POOLING_TYPES]
    if unknown:
        raise ModelLoadError(f"Pooling asks for {', '.join(unknown)}; known are {', '.join(POOLING_TYPES)}.")
    return names or ("mean",)


def load_pooler(modules: Sequence[ModuleFiles], device: torch.device) -> Pooler:
    """Load a Pooling module and the modules after it. Raises ``ModelLoadError``."""
    if not modules or modules[0].name != "Pooling":
        raise ModelLoadError("The transformer is not followed by a Pooling module.")
    return load_pooled(modules[1:], device, pooling=pooling_names(modules[0].config))


def load_pooled(modules: Sequence[ModuleFiles], device: torch.device, *, pooling: Sequence[str] = ()) -> Pooler:
    """Load the modules after pooling, or after a model that pools by itself. Raises ``ModelLoadError``."""
    unknown = [files.name for files in modules if files.name not in MODULES]
    if unknown:
        raise ModelLoadError(f"modules.json asks for {', '.join(unknown)}, which cannot be loaded.")
    try:
        loaded = [load_module(files) for files in modules]
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"A module cannot be loaded: {error}") from error
    return Pooler(pooling, loaded).to(device).eval()


def load_module(files: ModuleFiles) -> nn.Module:
    """Load one module of ``MODULES``. Raises ``ModelLoadError``, and what reading its weights raises."""
    _require_sentence_embedding(files)
    return MODULES[files.name](files)


class Dense(nn.Module):
    """A linear layer with an activation, and perhaps a residual."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        config = files.config
        in_features, out_features = config["in_features"], config["out_features"]
        self.linear = nn.Linear(in_features, out_features, bias=config.get("bias", True))
        self.activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.use_residual = bool(config.get("use_residual"))
        if self.use_residual and in_features != out_features:
            self.residual = nn.Linear(in_features, out_features, bias=False)
        self.load_state_dict(_read_weights(files.path))

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, in_features] to [rows, out_features]."""
        out: Tensor = self.activation(self.linear(rows))
        if not self.use_residual:
            return out
        return out + (self.residual(rows) if hasattr(self, "residual") else rows)


MODULES: Mapping[str, Callable[[ModuleFiles], nn.Module]] = {"Dense": Dense, "Normalize": lambda _: Normalize()}
"""By their class names in ``modules.json``."""


def _require_sentence_embedding(files: ModuleFiles) -> None:
    for key in ("module_input_name", "module_output_name"):
        if files.config.get(key, "sentence_embedding") not in ("sentence_embedding", None):
            raise ModelLoadError(f"{files.name} works on {files.config[key]!r}, which is not supported.")


def _activation(dotted: str) -> nn.Module:
    package, _, name = dotted.rpartition(".")
    found = getattr(nn, name, None)
    if package.partition(".")[0] != "torch" or not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelLoadError(f"The activation function {dotted} is not one of torch.nn's.")
    return found()


def _read_weights(folder: Path) -> dict[str, Tensor]:
    safe = folder / "model.safetensors"
    if safe.is_file():
        return load_file(safe)
    weights: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return weights

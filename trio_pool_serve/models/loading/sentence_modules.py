"""Loading the modules of sentence-transformers that ``modules.json`` lists after the transformer."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.loading.checkpoint import read_weights
from trio_pool_serve.models.model_kind import pooling_modes
from trio_pool_serve.runner.heads.classification import activation_named
from trio_pool_serve.runner.heads.pooling import POOLING_TYPES, Normalize, Pooler


def load_pooler(modules: Sequence[ModuleFiles], device: torch.device) -> Pooler:
    """Load a Pooling module and the modules after it. Raises ``ModelLoadError``."""
    if not modules or modules[0].name != "Pooling":
        raise ModelLoadError("The transformer is not followed by a Pooling module.")
    pooling = pooling_modes(modules[0].config)
    if unknown := [name for name in pooling if name not in POOLING_TYPES]:
        raise ModelLoadError(f"Pooling requires {', '.join(unknown)}; known are {', '.join(POOLING_TYPES)}.")
    return load_output_modules(modules[1:], device, pooling=pooling)


def load_output_modules(modules: Sequence[ModuleFiles], device: torch.device, *, pooling: Sequence[str] = ()) -> Pooler:
    """Load the modules after pooling, or after a model that pools its own output. Raises ``ModelLoadError``."""
    return Pooler(pooling, load_modules(modules)).to(device).eval()


def load_modules(modules: Sequence[ModuleFiles]) -> list[nn.Module]:
    """Load modules of ``MODULES``. Raises ``ModelLoadError``."""
    if unknown := [files.name for files in modules if files.name not in MODULES]:
        raise ModelLoadError(f"modules.json requires {', '.join(unknown)}, which cannot be loaded.")
    for files in modules:
        files.require_vectors()
    try:
        return [MODULES[files.name](files) for files in modules]
    except Exception as error:
        raise ModelLoadError(f"A module cannot be loaded: {error}") from error


class Dense(nn.Module):
    """A linear layer with an activation and an optional residual."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        config = files.config
        in_features, out_features = config["in_features"], config["out_features"]
        self.linear = nn.Linear(in_features, out_features, bias=config.get("bias", True), dtype=torch.float32)
        self.activation = activation_named(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.residual: nn.Module | None = None
        if config.get("use_residual"):
            is_square = in_features == out_features
            self.residual = (
                nn.Identity() if is_square else nn.Linear(in_features, out_features, bias=False, dtype=torch.float32)
            )
        self.load_state_dict(read_weights(files.path))

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, in_features] to [rows, out_features]."""
        out = self.activation(self.linear(rows))
        return out if self.residual is None else out + self.residual(rows)


class Truncate(nn.Module):
    """sentence-transformers' ``truncate_dim``: the beginning of a vector, which is not normalised again."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        self.dimensions = files.config["dimensions"]

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, at most ``dimensions``]."""
        return rows[:, : self.dimensions]


MODULES: Mapping[str, Callable[[ModuleFiles], nn.Module]] = {
    "Dense": Dense,
    "Normalize": lambda _: Normalize(),
    "Truncate": Truncate,
}
"""Module constructors by class name in ``modules.json``."""

"""Loading the modules of sentence-transformers that ``modules.json`` lists after the transformer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.files.pooled_modules import has_layers
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, read_weights, require_own_class
from trio_pool_serve.models.model_kind import ModelFolder, pooling_modes
from trio_pool_serve.runner.heads.classification import activation_named
from trio_pool_serve.runner.heads.pooling import POOLING_TYPES, LayerMean, Normalize, Pooler, Truncate
from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams


def load_pooled(folder: ModelFolder[Any], params: LoadingParams) -> tuple[Backbone, Pooler, int]:
    """Load a transformer and the modules that pool its states. Raises ``ModelLoadError``.

    The last value is ``LoadedModel.output_width``: not 0 if all hidden states are in memory at once.
    """
    require_own_class(folder, params)
    modules, width = folder.spec.modules, 0
    pooler = load_pooler(modules[1:] if has_layers(modules) else modules, params.device)
    mean = _load_mean(modules[0]) if has_layers(modules) else None
    model: Any = load_checkpoint(folder, params)
    if mean is not None:
        model.register_forward_hook(mean)
        width = (mean.start + len(mean.weights)) * model.config.get_text_config().hidden_size
    return Backbone(model), pooler, width


def _load_mean(files: ModuleFiles) -> LayerMean:
    """Read a WeightedLayerPooling, with sentence-transformers' defaults. Raises ``ModelLoadError``."""
    start, layers = files.config.get("layer_start", 4), files.config.get("num_hidden_layers", 12)
    weights = read_weights(files.path).get("layer_weights")
    are_numbers = type(start) is type(layers) is int and start >= 0
    if not are_numbers or weights is None or weights.shape != (layers + 1 - start,):
        found = "no layer_weights" if weights is None else f"layer_weights {list(weights.shape)}"
        raise ModelLoadError(
            f"{files.path} has {found}, layer_start {start!r} and num_hidden_layers {layers!r}; accepted is a "
            "weight for each hidden state from layer_start to num_hidden_layers."
        )
    return LayerMean(start, weights.tolist())


def load_pooler(modules: Sequence[ModuleFiles], device: torch.device) -> Pooler:
    """Load a Pooling module and the modules after it. Raises ``ModelLoadError``."""
    require(bool(modules) and modules[0].name == "Pooling", "The transformer is not followed by a Pooling module.")
    pooling = pooling_modes(modules[0].config)
    if unknown := [name for name in pooling if name not in POOLING_TYPES]:
        raise ModelLoadError(f"Pooling requires {', '.join(unknown)}; accepted: {', '.join(POOLING_TYPES)}.")
    return load_output_modules(modules[1:], device, pooling=pooling)


def load_output_modules(modules: Sequence[ModuleFiles], device: torch.device, *, pooling: Sequence[str] = ()) -> Pooler:
    """Load the modules after pooling, or after a model that pools its own output. Raises ``ModelLoadError``."""
    return Pooler(pooling, load_modules(modules)).to(device).eval()


def load_modules(modules: Sequence[ModuleFiles]) -> list[nn.Module]:
    """Load modules of ``MODULES``. Raises ``ModelLoadError``."""
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
        # "meta" allocates nothing, whatever the numbers.
        linear = partial(nn.Linear, in_features, out_features, dtype=torch.float32, device="meta")
        self.linear = linear(bias=config.get("bias", True))
        self.activation = activation_named(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        residual = nn.Identity() if in_features == out_features else linear(bias=False)
        self.residual: nn.Module | None = residual if config.get("use_residual") else None
        self.load_state_dict({name: weight.float() for name, weight in read_weights(files.path).items()}, assign=True)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, in_features] to [rows, out_features]."""
        out = self.activation(self.linear(rows))
        return out if self.residual is None else out + self.residual(rows)


def layer_norm(files: ModuleFiles) -> nn.LayerNorm:
    """Load a LayerNorm over a vector, with torch's usual epsilon."""
    norm = nn.LayerNorm(files.config["dimension"], device="meta")  # allocates nothing, whatever the number
    norm.load_state_dict(read_weights(files.path, "norm."), assign=True)
    return norm.float()


MODULES: Mapping[str, Callable[[ModuleFiles], nn.Module]] = {
    "Dense": Dense,
    "LayerNorm": layer_norm,
    "Normalize": lambda _: Normalize(),
    "Truncate": lambda files: Truncate(files.config["dimensions"]),
}
"""Module constructors by class name in ``modules.json``."""

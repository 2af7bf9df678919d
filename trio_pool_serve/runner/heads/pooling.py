"""Token states to one vector per row, and the heads behind that.

The formulas are those of sentence-transformers' modules of the same names, computed in float32.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles

PoolingType = Callable[[Tensor, Tensor], Tensor]
"""(states [rows, tokens, hidden] float32, mask [rows, tokens] bool) → [rows, hidden] float32."""


def _cls(states: Tensor, mask: Tensor) -> Tensor:
    first = mask.int().argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), first]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(dim=1)


def _sum(states: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), states).squeeze(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask.float()) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _mean_sqrt_len(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask.float()) / mask.sum(dim=1, keepdim=True).clamp(min=1).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Weigh the token at position i (from 1) by i: SGPT, https://arxiv.org/abs/2202.08904, eq. 4."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=torch.float32)
    return _sum(states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


POOLING_TYPES: Mapping[str, PoolingType] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""By their names in ``1_Pooling/config.json``; several are concatenated in this order."""

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


class Dense(nn.Module):
    """A linear layer with an activation, and perhaps a residual."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        config = files.config
        _require_sentence_embedding(files)
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


class Normalize(nn.Module):
    """Scale rows to unit length."""

    def __init__(self, files: ModuleFiles) -> None:
        super().__init__()
        _require_sentence_embedding(files)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, d]."""
        return nn.functional.normalize(rows, dim=-1)


HEADS: Mapping[str, type[nn.Module]] = {"Dense": Dense, "Normalize": Normalize}


class PooledAlready(nn.Module):
    """The heads behind a model that gives one vector per row itself, in float32.

    ``normalizes`` tells whether rows leave at unit length by the model's own wish.
    """

    def __init__(self, modules: tuple[ModuleFiles, ...]) -> None:
        super().__init__()
        unknown = [files.name for files in modules if files.name not in HEADS]
        if unknown:
            raise ModelLoadError(f"modules.json asks for {', '.join(unknown)}, which cannot be loaded.")
        try:
            heads = [HEADS[files.name](files) for files in modules]
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(f"A head cannot be loaded: {error}") from error
        self.normalizes = bool(heads) and isinstance(heads[-1], Normalize)
        if self.normalizes:
            # Applied by the runner instead, after the row has been cut to the dimensions asked for.
            heads.pop()
        self.heads = nn.ModuleList(heads).float()

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Map rows [rows, hidden] to [rows, d] float32; the mask chooses nothing any more."""
        del mask
        rows = rows.float()
        for head in self.heads:
            rows = head(rows)
        return rows


class Pooler(PooledAlready):
    """Pooling and the heads that follow it, in float32."""

    def __init__(self, modules: tuple[ModuleFiles, ...]) -> None:
        if not modules or modules[0].name != "Pooling":
            raise ModelLoadError("The transformer is not followed by a Pooling module.")
        super().__init__(modules[1:])
        self.pooling = pooling_names(modules[0].config)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map states [rows, tokens, hidden] and mask [rows, tokens] (bool) to [rows, d] float32."""
        states = states.float()
        rows = torch.cat([POOLING_TYPES[name](states, mask) for name in self.pooling], dim=-1)
        return super().forward(rows, mask)


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

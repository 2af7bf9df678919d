"""Late-interaction models: a transformer, and a projection of each token's state."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.late_interaction.spec import LateInteraction
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_module
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import HoldQueryHead, MaxSimHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import HoldQuery, MaxSim, TokenEmbed

PROJECTION = "linear.weight"
"""The original ColBERT's name for it, among the transformer's weights."""


def load_late_interaction(folder: ModelFolder[LateInteraction], params: LoadingParams) -> LoadedModel:
    """Load a ``LateInteraction`` model."""
    spec = folder.spec
    backbone = Backbone(load_checkpoint(folder, params))
    try:
        layers = [_projection(folder.path)] if spec.projection_is_in_checkpoint else []
        layers += _layers(spec.modules)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"The projection cannot be loaded: {error}") from error
    # A last Normalize is applied by the head, after a vector has been cut to the dimensions asked for.
    normalizes = bool(spec.modules) and spec.modules[-1].name == "Normalize"
    project = nn.Sequential(*(layers[:-1] if normalizes else layers)).float().to(params.device).eval()
    tokens = TokenEmbeddingHead(project, normalizes=normalizes)
    return LoadedModel(
        backbone=backbone,
        heads={
            TokenEmbed: tokens,
            HoldQuery: HoldQueryHead(tokens),
            MaxSim: MaxSimHead(tokens, averages=spec.averages),
        },
        about="late interaction",
    )


def _layers(modules: Sequence[ModuleFiles]) -> list[nn.Module]:
    return [load_module(files) for files in modules]


def _projection(folder: Path) -> nn.Module:
    weight = _read_projection(folder)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.load_state_dict({"weight": weight})
    return linear


def _read_projection(folder: Path) -> Tensor:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        with safe_open(safe, "pt") as weights:
            if PROJECTION in weights.keys():  # noqa: SIM118  (it is no mapping)
                weight: Tensor = weights.get_tensor(PROJECTION)
                return weight
    elif pickled.is_file():
        loaded: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
        if PROJECTION in loaded:
            return loaded[PROJECTION]
    raise ModelLoadError(f"The checkpoint of {folder} has no {PROJECTION}, the projection of a ColBERT.")

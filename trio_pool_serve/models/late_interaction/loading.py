"""Loading late-interaction models: a transformer and a projection of each token's state."""

from pathlib import Path

import torch
from torch import nn

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.late_interaction import LateInteraction
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, read_weights
from trio_pool_serve.models.loading.sentence_modules import load_modules
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import MaxSimHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import MaxSim, TokenEmbed

PROJECTION = "linear.weight"
"""The original ColBERT's name of the projection, among the transformer's weights."""


def load_late_interaction(folder: ModelFolder[LateInteraction], params: LoadingParams) -> LoadedModel:
    """Load a ``LateInteraction`` model."""
    spec = folder.spec
    backbone = Backbone(load_checkpoint(folder, params, others=(PROJECTION,)))
    layers = [_load_projection(folder.path)] if spec.projection_is_in_checkpoint else []
    layers += load_modules(spec.modules)
    # The head applies a final Normalize, after a vector has been truncated to the requested dimensions.
    normalizes = bool(spec.modules) and spec.modules[-1].name == "Normalize"
    project = nn.Sequential(*(layers[:-1] if normalizes else layers)).float().to(params.device).eval()
    tokens = TokenEmbeddingHead(project, normalizes=normalizes)
    return LoadedModel(
        backbone=backbone,
        heads={TokenEmbed: tokens, MaxSim: MaxSimHead(tokens, mean_scores=spec.mean_scores)},
        description="late interaction" if spec.token_pooling is None else f"late interaction, {spec.token_pooling}",
    )


def _load_projection(folder: Path) -> nn.Module:
    weight = read_weights(folder, PROJECTION).get("")
    if weight is None or weight.dim() != 2:
        raise ModelLoadError(f"The checkpoint of {folder} has no {PROJECTION}, the projection of a ColBERT.")
    require(
        weight.itemsize > 1, f"{PROJECTION} in {folder} is stored in {weight.dtype}; a projection is not dequantised."
    )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float32)
    linear.load_state_dict({"weight": weight})
    return linear

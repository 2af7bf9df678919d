"""Loading BGE-M3: one transformer with a dense, a sparse and a token embedding head."""

import torch
from torch import nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.bge_m3 import MULTI_VECTOR_LAYER, SPARSE_LAYER, BgeM3
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, require_finite
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.heads.sparse import LexicalHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import Embed, SparseEmbed, TokenEmbed


def load_bge_m3(folder: ModelFolder[BgeM3], params: LoadingParams) -> LoadedModel:
    """Load a ``BgeM3`` model."""
    spec = folder.spec
    backbone = Backbone(load_checkpoint(folder, params))
    pooler = load_pooler(spec.modules, params.device)
    return LoadedModel(
        backbone=backbone,
        heads={
            Embed: EmbeddingHead(pooler),
            SparseEmbed: LexicalHead(_linear(folder, params, SPARSE_LAYER), spec.unweighted_token_ids),
            TokenEmbed: TokenEmbeddingHead(_linear(folder, params, MULTI_VECTOR_LAYER), normalizes=True),
        },
        description=f"{'+'.join(pooler.pooling)} pooling, lexical weights, token vectors",
    )


def _linear(folder: ModelFolder[BgeM3], params: LoadingParams, name: str) -> nn.Linear:
    """Return a layer that is saved in its own state dict file, in float32."""
    try:
        state = torch.load(folder.path / name, map_location="cpu", weights_only=True)
        out_features, in_features = state["weight"].shape
        linear = nn.Linear(in_features, out_features, bias="bias" in state, dtype=torch.float32)
        linear.load_state_dict(state)
    except Exception as error:
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error
    require_finite(state.items(), folder.path / name)
    return linear.float().to(params.device).eval()

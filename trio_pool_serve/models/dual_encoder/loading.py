"""Dual encoders: texts and images in one space."""

from trio_pool_serve.models.dual_encoder.spec import DualEncoder
from trio_pool_serve.models.dual_encoder.vision_backbone import TwoTowers
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_pooled
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.embedding import EmbeddingHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed


def load_dual_encoder(folder: ModelFolder[DualEncoder], params: LoadingParams) -> LoadedModel:
    """Load a ``DualEncoder`` model."""
    heads = load_pooled(folder.spec.modules, params.device)
    return LoadedModel(
        backbone=TwoTowers(load_checkpoint(folder, params, may_lack=())),
        heads={Embed: EmbeddingHead(heads)},
        about="texts and images",
    )

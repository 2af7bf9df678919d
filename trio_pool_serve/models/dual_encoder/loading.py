"""Dual encoders: texts and images in one space."""

from trio_pool_serve.models.dual_encoder.backbone import TwoTowers
from trio_pool_serve.models.dual_encoder.spec import DualEncoder
from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.runner.heads.embedding import EmbeddingHead
from trio_pool_serve.runner.heads.pooling import PooledAlready
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed


def load_dual_encoder(folder: ModelFolder, params: LoadingParams) -> LoadedModel:
    """Load a ``DualEncoder`` model."""
    assert isinstance(folder.architecture, DualEncoder)  # noqa: S101
    heads = PooledAlready(folder.architecture.modules).to(params.device).eval()
    return LoadedModel(
        backbone=TwoTowers(load_checkpoint(folder, params, may_lack=())),
        heads={Embed: EmbeddingHead(heads)},
        about="texts and images",
    )

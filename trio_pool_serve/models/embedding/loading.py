"""Embedding models: a transformer, a pooling module, and heads behind it."""

from torch import nn

from trio_pool_serve.models.embedding.spec import Embedding
from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed, TokenEmbed


def load_embedding(folder: ModelFolder, params: LoadingParams) -> LoadedModel:
    """Load an ``Embedding`` model. A token's vector is the transformer's own, before pooling and heads."""
    assert isinstance(folder.architecture, Embedding)  # noqa: S101
    pooler = Pooler(folder.architecture.modules).to(params.device).eval()
    return LoadedModel(
        backbone=Backbone(load_checkpoint(folder, params)),
        heads={Embed: EmbeddingHead(pooler), TokenEmbed: TokenEmbeddingHead(nn.Identity(), normalizes=False)},
        about=f"{'+'.join(pooler.pooling)} pooling",
    )

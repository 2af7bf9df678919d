"""Embedding models that read images among the words."""

from torch import nn

from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.vision_language.backbone import QwenVision
from trio_pool_serve.models.vision_language.spec import VisionLanguage
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed, TokenEmbed


def load_vision_language(folder: ModelFolder, params: LoadingParams) -> LoadedModel:
    """Load a ``VisionLanguage`` model. A token's vector is the transformer's own, before pooling and heads."""
    architecture = folder.architecture
    assert isinstance(architecture, VisionLanguage)  # noqa: S101
    pooler = Pooler(architecture.modules).to(params.device).eval()
    model = load_checkpoint(folder, params, may_lack=())
    return LoadedModel(
        backbone=QwenVision(model, image_token_id=architecture.patches.token_id),
        heads={Embed: EmbeddingHead(pooler), TokenEmbed: TokenEmbeddingHead(nn.Identity(), normalizes=False)},
        about=f"texts with images, {'+'.join(pooler.pooling)} pooling",
    )

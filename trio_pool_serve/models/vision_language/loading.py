"""Loading vision-language embedding models."""

from torch import nn

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.vision_language.spec import VisionLanguage
from trio_pool_serve.models.vision_language.vision_backbone import QwenVision
from trio_pool_serve.runner.heads.embedding import EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed, TokenEmbed


def load_vision_language(folder: ModelFolder[VisionLanguage], params: LoadingParams) -> LoadedModel:
    """Load a ``VisionLanguage`` model. Token embeddings are the transformer's states, before pooling."""
    spec = folder.spec
    pooler = load_pooler(spec.modules, params.device)
    model = load_checkpoint(folder, params, optional_weights=())
    return LoadedModel(
        backbone=QwenVision(model, image_token_id=spec.patches.token_id),
        heads={Embed: EmbeddingHead(pooler), TokenEmbed: TokenEmbeddingHead(nn.Identity(), normalizes=False)},
        description=f"texts with images, {'+'.join(pooler.pooling)} pooling",
    )

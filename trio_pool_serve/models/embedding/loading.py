"""Loading embedding models: a transformer, a pooling module, and the modules after it."""

from torch import nn

from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.loading.sentence_modules import load_pooled
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.runner.heads.embedding import ChunkEmbeddingHead, EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import Embed, EmbedChunks, TokenEmbed


def load_embedding(folder: ModelFolder[Embedding], params: LoadingParams) -> LoadedModel:
    """Load an ``Embedding`` model. Token embeddings are the transformer's states, before pooling."""
    backbone, pooler, output_width = load_pooled(folder, params)
    return LoadedModel(
        backbone=backbone,
        heads={
            Embed: EmbeddingHead(pooler),
            EmbedChunks: ChunkEmbeddingHead(pooler),
            TokenEmbed: TokenEmbeddingHead(nn.Identity(), normalizes=False),
        },
        description=f"{'+'.join(pooler.pooling)} pooling",
        output_width=output_width,
    )

"""Embedding models: a transformer, pooling, and the modules after it."""

from trio_pool_serve.models.embedding.spec import read_embedding
from trio_pool_serve.models.model_kind import ModelKind

EMBEDDING = ModelKind(
    read=read_embedding,
    load="trio_pool_serve.models.embedding.loading:load_embedding",
    exported="trio_pool_serve.models.embedding.exported:embedding_heads",
)

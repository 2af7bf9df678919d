"""Embedding models: a transformer, pooling, and the modules after it."""

from typing import TYPE_CHECKING

from trio_pool_serve.models.embedding.spec import Embedding, read_embedding
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.model_spec import pooling_modes

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads


def embedding_heads(spec: Embedding) -> "BuiltHeads":
    """Return the heads. Raises ``UnusableGraphError`` if there are other modules than Pooling and Normalize."""
    # Imported here: an optional dependency.
    from trio_pool_serve.runner.openvino.exported_graph import UnusableGraphError, pooling_heads

    names = [module.name for module in spec.modules]
    if names not in (["Pooling"], ["Pooling", "Normalize"]):
        raise UnusableGraphError(f"without torch there is no {' + '.join(names)}, only Pooling and Normalize")
    return pooling_heads(pooling_modes(spec.modules[0].config), normalizes=spec.normalizes)


EMBEDDING = ModelKind(
    read=read_embedding,
    load="trio_pool_serve.models.embedding.loading:load_embedding",
    exported_heads=embedding_heads,
)

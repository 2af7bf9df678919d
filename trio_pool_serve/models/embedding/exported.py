"""The heads of an embedding model whose transformer is in an exported file."""

from trio_pool_serve.models.embedding.spec import Embedding
from trio_pool_serve.models.model_spec import pooling_modes
from trio_pool_serve.runner.openvino.built_heads import BuiltHeads, pooling_heads
from trio_pool_serve.runner.openvino.exported_graph import UnusableGraphError


def embedding_heads(spec: Embedding) -> BuiltHeads:
    """Return the heads. Raises ``UnusableGraphError`` if there are other modules than Pooling and Normalize."""
    names = [module.name for module in spec.modules]
    if names not in (["Pooling"], ["Pooling", "Normalize"]):
        raise UnusableGraphError(f"without torch there is no {' + '.join(names)}, only Pooling and Normalize")
    return pooling_heads(pooling_modes(spec.modules[0].config), normalizes=spec.normalizes)

"""The kinds of model that can be served, one line each."""

from typing import Any

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.bge_m3 import BGE_M3
from trio_pool_serve.models.classification import CLASSIFICATION
from trio_pool_serve.models.dual_encoder import DUAL_ENCODER
from trio_pool_serve.models.embedding import EMBEDDING
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.generative_reranker import GENERATIVE_RERANKER
from trio_pool_serve.models.late_interaction import LATE_INTERACTION
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.models.page_retrieval import PAGE_RETRIEVAL
from trio_pool_serve.models.process_reward import PROCESS_REWARD
from trio_pool_serve.models.routed import ROUTED
from trio_pool_serve.models.sparse import SPARSE
from trio_pool_serve.models.static import STATIC
from trio_pool_serve.models.vision_language import VISION_LANGUAGE

KINDS: list[ModelKind[Any]] = [
    ROUTED,
    PROCESS_REWARD,
    CLASSIFICATION,
    GENERATIVE_RERANKER,
    BGE_M3,
    PAGE_RETRIEVAL,
    LATE_INTERACTION,
    SPARSE,
    DUAL_ENCODER,
    VISION_LANGUAGE,
    STATIC,
    EMBEDDING,
]
"""All kinds, in the order in which they are tried; the last accepts every folder that no other kind has recognised."""


def recognise(files: FolderFiles, config: ModelConfig) -> tuple[ModelKind[Any], ModelSpec]:
    """Return the kind of a model by its files, and the spec that they declare. Raises ``ModelLoadError``."""
    return next((kind, spec) for kind in KINDS if (spec := kind.read(files, config)) is not None)

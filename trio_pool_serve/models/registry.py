"""The kinds of model that can be served, one line each."""

from typing import Any

from trio_pool_serve.models.bge_m3.kind import BGE_M3
from trio_pool_serve.models.classification.kind import CLASSIFICATION
from trio_pool_serve.models.dual_encoder.kind import DUAL_ENCODER
from trio_pool_serve.models.embedding.kind import EMBEDDING
from trio_pool_serve.models.generative_reranker.kind import GENERATIVE_RERANKER
from trio_pool_serve.models.late_interaction.kind import LATE_INTERACTION
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.page_retrieval.kind import PAGE_RETRIEVAL
from trio_pool_serve.models.process_reward.kind import PROCESS_REWARD
from trio_pool_serve.models.sparse.kind import SPARSE
from trio_pool_serve.models.vision_language.kind import VISION_LANGUAGE

KINDS: tuple[ModelKind[Any], ...] = (
    PROCESS_REWARD,
    CLASSIFICATION,
    GENERATIVE_RERANKER,
    BGE_M3,
    PAGE_RETRIEVAL,
    LATE_INTERACTION,
    SPARSE,
    DUAL_ENCODER,
    VISION_LANGUAGE,
    EMBEDDING,
)
"""In the order in which they are tried; the last accepts every folder that no other kind has recognised."""

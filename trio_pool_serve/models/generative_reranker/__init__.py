"""Generative rerankers: causal language models that score a query and a document."""

from trio_pool_serve.models.generative_reranker.pair_format import reranker_pair_format
from trio_pool_serve.models.generative_reranker.spec import read_generative_reranker
from trio_pool_serve.models.model_kind import ModelKind

GENERATIVE_RERANKER = ModelKind(
    read=read_generative_reranker,
    load="trio_pool_serve.models.generative_reranker.loading:load_generative_reranker",
    pair_format=reranker_pair_format,
)

"""Learned sparse models: SPLADE, with and without inference for queries."""

from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.sparse.spec import read_sparse
from trio_pool_serve.models.sparse.text_format import sparse_text_format

SPARSE = ModelKind(
    read=read_sparse,
    load="trio_pool_serve.models.sparse.loading:load_sparse",
    text_format=sparse_text_format,
)

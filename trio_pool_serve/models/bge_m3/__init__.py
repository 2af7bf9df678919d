"""BGE-M3: dense, sparse and token vectors from one forward pass."""

from trio_pool_serve.models.bge_m3.spec import read_bge_m3
from trio_pool_serve.models.bge_m3.text_format import bge_m3_text_format
from trio_pool_serve.models.model_kind import ModelKind

BGE_M3 = ModelKind(
    read=read_bge_m3,
    load="trio_pool_serve.models.bge_m3.loading:load_bge_m3",
    text_format=bge_m3_text_format,
)

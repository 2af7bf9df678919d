"""The vLLM dialect: pooling, classes, scores, rankings and tokens."""

from trio_pool_serve.api.endpoint import Dialect
from trio_pool_serve.api.openai import error_body
from trio_pool_serve.api.vllm_classify import CLASSIFY
from trio_pool_serve.api.vllm_pooling import POOLING
from trio_pool_serve.api.vllm_rerank import RERANK
from trio_pool_serve.api.vllm_score import SCORE
from trio_pool_serve.api.vllm_tokenize import DETOKENIZE, TOKENIZE

VLLM = Dialect(
    name="vllm",
    error_body=error_body,
    endpoints=(POOLING, CLASSIFY, SCORE, RERANK, TOKENIZE, DETOKENIZE),
)

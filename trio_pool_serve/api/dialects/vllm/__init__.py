"""The vLLM dialect: pooling, classes, scores, rankings and tokens."""

from trio_pool_serve.api.dialects.openai import error_body
from trio_pool_serve.api.dialects.vllm.classify import CLASSIFY
from trio_pool_serve.api.dialects.vllm.pooling_endpoint import POOLING
from trio_pool_serve.api.dialects.vllm.rerank import RERANK
from trio_pool_serve.api.dialects.vllm.scoring import SCORE
from trio_pool_serve.api.dialects.vllm.tokens import DETOKENIZE, TOKENIZE
from trio_pool_serve.api.http.endpoint import Dialect

VLLM = Dialect(name="vllm", error_body=error_body, endpoints=(POOLING, CLASSIFY, SCORE, RERANK, TOKENIZE, DETOKENIZE))

"""The vLLM dialect: pooling, classes, scores, rankings and tokens."""

from trio_pool_serve.api.dialects.openai import error_body
from trio_pool_serve.api.dialects.vllm.pooling_endpoints import CLASSIFY, POOLING
from trio_pool_serve.api.dialects.vllm.scoring_endpoints import RERANK, SCORE
from trio_pool_serve.api.dialects.vllm.token_endpoints import DETOKENIZE, TOKENIZE
from trio_pool_serve.api.http.endpoint import Dialect

VLLM = Dialect(name="vllm", error_body=error_body, endpoints=(POOLING, CLASSIFY, SCORE, RERANK, TOKENIZE, DETOKENIZE))

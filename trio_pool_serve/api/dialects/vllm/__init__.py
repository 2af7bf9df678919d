"""The vLLM dialect: pooling, classes, scores, rankings and tokens."""

from trio_pool_serve.api.dialects.openai import error_body
from trio_pool_serve.api.dialects.vllm.pooling_endpoints import POOLING_ENDPOINTS
from trio_pool_serve.api.dialects.vllm.scoring_endpoints import SCORING_ENDPOINTS
from trio_pool_serve.api.dialects.vllm.token_endpoints import TOKEN_ENDPOINTS
from trio_pool_serve.api.http.endpoint import Dialect

VLLM = Dialect(name="vllm", error_body=error_body, endpoints=(*POOLING_ENDPOINTS, *SCORING_ENDPOINTS, *TOKEN_ENDPOINTS))

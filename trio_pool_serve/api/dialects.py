"""The dialects this server speaks, one line each."""

from trio_pool_serve.api.cohere import COHERE
from trio_pool_serve.api.endpoint import Dialect
from trio_pool_serve.api.jina import JINA
from trio_pool_serve.api.openai import OPENAI
from trio_pool_serve.api.tei import TEI
from trio_pool_serve.api.vllm import VLLM
from trio_pool_serve.api.voyage import VOYAGE

DIALECTS: tuple[Dialect, ...] = (OPENAI, VLLM, VOYAGE, JINA, COHERE, TEI)
"""Where two claim a request by their marks, the earlier one gets it."""

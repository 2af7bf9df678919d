"""The dialects of this server, one line each."""

from trio_pool_serve.api.dialects.cohere import COHERE
from trio_pool_serve.api.dialects.jina import JINA
from trio_pool_serve.api.dialects.openai import OPENAI
from trio_pool_serve.api.dialects.tei import TEI
from trio_pool_serve.api.dialects.vllm import VLLM
from trio_pool_serve.api.dialects.voyage import VOYAGE
from trio_pool_serve.api.http.endpoint import Dialect

DIALECTS: list[Dialect] = [
    OPENAI,
    VLLM,
    VOYAGE,
    JINA,
    COHERE,
    TEI,
]
"""Where the discriminators of two match a request, the earlier one gets it."""

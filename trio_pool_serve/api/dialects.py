"""The dialects this server speaks, one line each."""

from trio_pool_serve.api.endpoint import Dialect
from trio_pool_serve.api.openai import OPENAI
from trio_pool_serve.api.tei import TEI

DIALECTS: tuple[Dialect, ...] = (OPENAI, TEI)
"""Where two claim a request by their marks, the earlier one gets it."""
